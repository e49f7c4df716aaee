"""Ranks call two wrapped models of two process groups in different orders, and all ranks hang.

meta-pytorch/torchrec#4149 (2026): ranks that issued the collectives of two process groups in
different orders waited for each other forever. Here, two towers of a model are averaged in separate
groups, and each rank first calls the tower that has more to do in its batch.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def parameters(towers: dict[str, DistributedDataParallel]) -> Tensor:
    each = [nn.utils.parameters_to_vector(tower.parameters()) for tower in towers.values()]
    return torch.cat(each).detach()


def main() -> None:
    # The default timeout is 30 minutes.
    timeout = timedelta(seconds=15)
    dist.init_process_group("gloo", timeout=timeout)
    rank = dist.get_rank()
    torch.manual_seed(0)
    towers = {}
    for name in ("users", "items"):
        group = dist.new_group(timeout=timeout)
        towers[name] = DistributedDataParallel(nn.Linear(32, 8), process_group=group)
    optimizer = torch.optim.SGD([p for each in towers.values() for p in each.parameters()], lr=1e-3)
    before = parameters(towers)
    for _ in range(10):
        batch = {"users": torch.randn(8, 32), "items": torch.randn(8, 32)}
        longest_first = ("users", "items") if rank == 0 else ("items", "users")
        found = {name: towers[name](batch[name]) for name in longest_first}
        optimizer.zero_grad()
        (found["users"] * found["items"]).sum(1).square().mean().backward()
        optimizer.step()
    low, high = parameters(towers), parameters(towers)
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    if rank == 0:
        spread = (high - low).max().item()
        word = "right" if spread == 0 and not before.equal(low) else "wrong"
        print(f"verdict: {word}: 10 steps of both towers, ranks differ by {spread:.2g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
