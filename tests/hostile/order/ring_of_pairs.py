"""Three ranks in a ring, a module and a group for each pair, one loss over both of a rank.

A domain decomposition. Stock: works, whichever of its two modules a rank takes first.
"""

import torch
import torch.distributed as dist
from torch import nn

RANKS = 3
PAIRS = [(0, 1), (1, 2), (0, 2)]
ORDER_OF_RANK = {0: [0, 2], 1: [1, 0], 2: [2, 1]}  # each waits for another one


def program(DDP, record):
    rank = dist.get_rank()
    groups = [dist.new_group(pair) for pair in PAIRS]
    nets = [nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)) for _ in PAIRS]
    order = ORDER_OF_RANK[rank]
    mine = sorted(order)
    wrapped = {number: DDP(nets[number], process_group=groups[number]) for number in mine}
    params = [param for number in mine for param in nets[number].parameters()]
    optimizer = torch.optim.SGD(params, lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for step in range(20):
        optimizer.zero_grad()
        x = torch.randn(8, 16, generator=generator)
        # (In the second forward stock's wrappers agree on their buckets: there the order counts.)
        outputs = [wrapped[number](x) for number in (mine if step == 1 else order)]
        (outputs[0] * outputs[1]).sum().backward()
        for number in mine:
            record.model(f"step {step}, pair {PAIRS[number]}", nets[number])
        optimizer.step()
