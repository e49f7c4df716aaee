"""Calling a wrapped model through torch.func.jvp raises an error.

pytorch/pytorch#182661 (2026): a loss uses the result of `torch.func.jvp`, as in consistency models
and mean flows. With `static_graph=True`, it fails elsewhere.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import jvp
from torch.nn.parallel import DistributedDataParallel

FLAGS: list[dict] = [{}, {"static_graph": True}, {"find_unused_parameters": True}]


def train(flags: dict | None, ranks: slice) -> Tensor:
    """Return the parameters after training on batches of ``ranks``, without DDP if no flags."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
    model = net if flags is None else DistributedDataParallel(net, **flags)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(6):
        images = torch.randn(2, 8, 4)[ranks].flatten(0, 1)
        velocity, slope = jvp(model, (images,), (torch.ones_like(images),))[:2]
        optimizer.zero_grad()
        (velocity.square() + slope.square()).mean().backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def main() -> None:
    dist.init_process_group("gloo")
    rank, expected, found = dist.get_rank(), train(None, slice(2)), []
    for flags in FLAGS:
        try:
            off = (train(flags, slice(rank, rank + 1)) - expected).abs().max().item()
            found.append("trains" if off < 1e-6 else f"off one process by {off:.0e}")
        except RuntimeError as error:
            found.append(f"'{str(error)[:45]} ...'")
    if rank == 0:
        word = "right" if set(found) == {"trains"} else "wrong"
        print(f"verdict: {word}: no flag: {found[0]}; static: {found[1]}; unused: {found[2]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
