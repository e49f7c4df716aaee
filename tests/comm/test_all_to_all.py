"""Messages that are sent and received at the same time."""

import torch
import torch.distributed as dist
from distributed import ranks

from tritonddp.coordination.point_to_point import MessagesUnderWay


@ranks(2, 3)
def test_each_rank_gets_what_every_rank_has_for_it(rank: int) -> None:
    world_size, group = dist.get_world_size(), dist.group.WORLD
    sent = [
        [torch.full((5000,), 100 * n + 10 * rank + to) for to in range(world_size)]
        for n in range(3)
    ]
    received = [torch.zeros(world_size, 5000, dtype=torch.int64) for _ in range(3)]
    under_way = [
        MessagesUnderWay(group, tag, dict(enumerate(received[tag])), dict(enumerate(sent[tag])))
        for tag in ([0, 1, 2] if rank == 0 else [2, 0, 1])  # in whatever order they are sent
    ]
    dist.all_reduce(torch.ones(3))  # while they are under way
    for each in under_way:
        each.wait()
    for number, rows in enumerate(received):
        senders = [100 * number + 10 * sender + rank for sender in range(world_size)]
        senders[rank] = 0  # what a rank has for itself is not sent
        assert rows.unique(dim=1).flatten().tolist() == senders


@ranks(3)
def test_ranks_are_those_of_the_group(rank: int) -> None:
    group = dist.new_group([2, 0])
    if rank == 1:
        return
    part, gathered = torch.full((7,), rank), torch.full((2, 7), 9)
    messages = MessagesUnderWay(group, 0, dict(enumerate(gathered)), dict.fromkeys(range(2), part))
    messages.wait()
    own = group.rank()
    assert gathered[own].tolist() == [9] * 7
    assert gathered[1 - own].tolist() == [dist.get_process_group_ranks(group)[1 - own]] * 7
