"""Wrappers with a group each, in any order, and waits that come before a launch."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from hostile.table import Expected, program

PAIRS = [(0, 1), (1, 2), (0, 2)]
ORDER_OF_RANK = {0: [0, 2], 1: [1, 0], 2: [2, 1]}  # each waits for another one


@program(ranks=3)
def ring_of_pairs(DDP, record):
    """Three ranks in a ring, a module and a group for each pair, one loss over both of a rank.

    A domain decomposition. Stock: works, whichever of its two modules a rank takes first.
    """
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


def _steps_of_two(DDP, nets, count, width, loss_of, is_in_order):
    """Steps of two nets with a group each; yields the number of each behind its backward."""
    rank = dist.get_rank()
    wrapped = [DDP(net, process_group=dist.new_group()) for net in nets]
    params = [param for net in nets for param in net.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for step in range(count):
        optimizer.zero_grad()
        x = torch.randn(8, width, generator=generator)
        order = [0, 1] if is_in_order(step) or (rank + step) % 2 else [1, 0]
        outputs = {number: wrapped[number](x) for number in order}
        loss_of(outputs[0] * outputs[1]).backward()
        yield step
        optimizer.step()


@program()
def two_groups(DDP, record):
    """Two encoders, each with a group of its own, one loss over both.

    Ranks take them in any order. Stock: works, since each group has its own collectives.
    """
    nets = [nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)) for _ in range(2)]
    # (In the second forward stock's wrappers agree on their buckets: there the order counts.)
    for step in _steps_of_two(DDP, nets, 20, 16, Tensor.sum, lambda step: step == 1):
        for number, net in enumerate(nets):
            record.model(f"step {step}, net {number}", net)


@program(ranks=4)
def two_groups_of_four_ranks(DDP, record):
    """Two encoders with a group each and large buckets, on four ranks; the order changes midway.

    Stock: works, since each group has its own collectives.
    """
    nets = [nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256)) for _ in range(2)]
    for step in _steps_of_two(DDP, nets, 12, 256, Tensor.mean, lambda step: step < 4):
        for number, net in enumerate(nets):
            for name, param in net.named_parameters():
                record.near(f"step {step}, net {number}, norm of {name}", param.grad.norm())


BEHIND_ITS_OWN = Expected(
    "A callback at the end of a backward waits for what another rank sends behind its own",
    error=r"Error: rank 0, (?s:.{,600})\brank 1\b",
    timeout=4,
)


@program(expected=BEHIND_ITS_OWN)
def waits_in_a_callback(DDP, record, first=0):
    """Rank 1 waits, in a callback at the end of its backward, for what rank 0 sends behind its
    own.

    Stock: works, since its buckets have been launched by then.
    """
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    ddp = DDP(net)
    others = dist.new_group()
    generator = torch.Generator().manual_seed(rank)

    def wait_in_the_end() -> None:
        Variable._execution_engine.queue_callback(
            lambda: dist.recv(torch.empty(1), src=0, group=others)
        )

    for step in range(8):
        ddp.zero_grad()
        loss = ddp(torch.randn(8, 256, generator=generator)).pow(2).mean()
        if rank == 1 and step >= first:
            loss.register_hook(lambda gradient: wait_in_the_end())
        loss.backward()
        if rank == 0 and step >= first:
            dist.send(torch.ones(1), dst=1, group=others)
        record.near(f"step {step}", net[0].weight.grad.norm())


@program(ranks=4, expected=BEHIND_ITS_OWN)
def waits_in_a_callback_of_shares(DDP, record):
    """Rank 1 of four waits in a callback from step 3 on, where large buckets travel in shares.

    Stock: works, since its buckets have been launched by then.
    """
    waits_in_a_callback(DDP, record, first=3)
