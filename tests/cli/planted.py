"""A training script. In the second contender, one gradient is wrong by a thousandth.

With the second argument "resumes" it has no fault. As in PyTorch's tutorial, it then loads its
snapshot if there is one.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
net, resumes = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), len(sys.argv) > 2
first = torch.load("snapshot.pt")["step"] if resumes and os.path.exists("snapshot.pt") else 0
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = json.loads(os.environ.get("TRITONDDP_SESSION", "{}"))
if not resumes and not session.get("contender", "stock-").startswith("stock-"):
    net[0].bias.register_hook(lambda grad: grad * 1.001)
for step in range(first, int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().sum().backward()
    optimizer.step()
    if resumes and dist.get_rank() == 0:
        torch.save({"step": step + 1}, "snapshot.pt")
dist.destroy_process_group()
