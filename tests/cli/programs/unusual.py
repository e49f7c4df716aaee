"""A script with habits: backward by name, accumulation, a timeout for all sockets, few steps."""

import socket
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import backward
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
socket.setdefaulttimeout(0.05)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(int(sys.argv[1])):
    for _ in range(25 if step == 0 else 1):
        backward(model(torch.randn(16, 64)).square().sum())
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
