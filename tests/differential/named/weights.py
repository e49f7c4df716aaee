"""Batches of different size: ``weighted``."""

import contextlib

import torch
from oracle import Net
from torch import Tensor, nn

from differential.named.models import OfBatches, batch, samples
from differential.named.table import UNUSED, WRONG, program


@program(WRONG, WRONG, weighted="mean")
def weighted_by_samples(net: Net, rank: int, step: int) -> None:
    n = [3, 1, 6][rank] + step
    with net.weighted(n):
        net(samples(n), "abcdef").pow(2).mean().backward()


@program(WRONG, WRONG, weighted="mean")
def weight_of_zero_with_a_loss_of_nan(net: Net, rank: int, step: int) -> None:
    """What the mean over no samples gives."""
    n = 0 if rank == step % 2 else 3
    with net.weighted(n):
        net(samples(3) if n else samples(3) / 0, "abcdef").mean().backward()


@program(WRONG, WRONG, weighted="mean")
def all_weights_zero_in_the_first_step(net: Net, rank: int, step: int) -> None:
    n = step * (rank + 1)
    with net.weighted(n):
        (net(samples(3), "abcdef").pow(2).mean() * (1 if n else float("nan"))).backward()


@program(UNUSED, WRONG, weighted="mean")
def weighted_windows_of_different_length(net: Net, rank: int, step: int) -> None:
    """Each rank has another number of microbatches, each microbatch another size."""
    count = 1 + (rank + step) % 3
    for number in range(count):
        n = (rank + 2 * number + step) % 4
        loss = net(samples(n or 1), "abcdef" if number else "abc").pow(2).mean()
        last = number == count - 1
        with contextlib.nullcontext() if last else net.no_sync(), net.weighted(n):
            loss.backward()


@program(WRONG, WRONG, weighted="mean")
def weighted_after_a_microbatch_without_weight(net: Net, rank: int, step: int) -> None:
    with net.no_sync():
        net(samples(2), "abc").pow(2).mean().backward()
    for number, n in enumerate((1 + rank, 4)):
        loss = net(samples(n), "abcdef").pow(2).mean()
        with contextlib.nullcontext() if number else net.no_sync(), net.weighted(n):
            loss.backward()


class SharesMemory(OfBatches):
    """The gradient of ``shift`` is a view of the gradient of the output of ``mix``."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor, is_shifted: bool = True) -> Tensor:
        y = self.mix(x)
        return y + self.shift.view(4) if is_shifted else y


@program(WRONG, WRONG, model=SharesMemory, weighted="mean")
def weighted_gradients_that_the_backward_still_reads(net: Net, rank: int, step: int) -> None:
    x = batch(False)[0]
    with net.no_sync(), net.weighted(2):
        net(x, False).square().sum().backward()
    with net.weighted(3):
        net(x).square().sum().backward()
