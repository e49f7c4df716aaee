"""A script in which something is wrong in the second contender: PLANTED says what.

``slow``: a tenth of the time of a step more. ``wrong``: one gradient is off by a thousandth.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = json.loads(os.environ.get("TRITONDDP_SESSION", "{}"))
is_planted = not session.get("contender", "stock-").startswith("stock-")
planted = os.environ.get("PLANTED", "") if is_planted else ""
if planted == "wrong":
    net[0].bias.register_hook(lambda grad: grad * 1.001)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().sum().backward()
    # The length of a step without what is planted: it sleeps, which a loaded machine does as well.
    time.sleep(0.0115 if planted == "slow" else 0.01)
    optimizer.step()
dist.destroy_process_group()
