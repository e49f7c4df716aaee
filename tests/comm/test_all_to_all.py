"""The all-to-all that sends and receives at once."""

import torch
import torch.distributed as dist
from distributed import ranks

from tritonddp.coordination.point_to_point import receive, send


@ranks(2, 3)
def test_each_rank_gets_what_every_rank_has_for_it(rank: int) -> None:
    world_size = dist.get_world_size()
    group = dist.group.WORLD
    sent, received, works = [], [], []
    for number in range(3):
        to = torch.arange(world_size)[:, None].expand(-1, 5000)
        sent.append(100 * number + 10 * rank + to)  # to each its own
        received.append(torch.zeros(world_size, 5000, dtype=torch.int64))
    tags = [0, 1, 2] if rank == 0 else [2, 0, 1]  # in whatever order they are sent
    for tag in tags:
        works += receive(received[tag], group, tag)
        works += send(sent[tag], received[tag], group, tag)
    dist.all_reduce(torch.ones(3))  # while they are under way
    for work in works:
        work.wait()
    senders = torch.arange(world_size)[:, None].expand(-1, 5000)
    for number in range(3):
        assert torch.equal(received[number], 100 * number + 10 * senders + rank), number


@ranks(3)
def test_rows_of_one_memory_make_an_all_gather(rank: int) -> None:
    group = dist.new_group([2, 0])
    if rank == 1:
        return
    part = torch.full((7,), rank, dtype=torch.uint8)
    gathered = torch.full((2, 7), 9, dtype=torch.uint8)
    works = receive(gathered, group, 0) + send(part.expand(2, -1), gathered, group, 0)
    for work in works:
        work.wait()
    members = dist.get_process_group_ranks(group)
    assert gathered.tolist() == [[member] * 7 for member in members]
