"""Two encoders, each with a group of its own, one loss over both; ranks take them in any order.

Stock: works, since each group has its own collectives.
"""

import torch
import torch.distributed as dist
from torch import nn


def program(DDP, record):
    rank = dist.get_rank()
    nets = [nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)) for _ in range(2)]
    wrapped = [DDP(net, process_group=dist.new_group()) for net in nets]
    params = [param for net in nets for param in net.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for step in range(20):
        optimizer.zero_grad()
        x = torch.randn(8, 16, generator=generator)
        # (In the second forward stock's wrappers agree on their buckets: there the order counts.)
        order = [0, 1] if step == 1 or (rank + step) % 2 else [1, 0]
        outputs = {number: wrapped[number](x) for number in order}
        (outputs[0] * outputs[1]).sum().backward()
        for number, net in enumerate(nets):
            record.model(f"step {step}, net {number}", net)
        optimizer.step()
