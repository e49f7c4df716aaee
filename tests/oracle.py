"""The oracle: the mean over ranks of what each rank's own, unwrapped model computes.

Every rank computes it alone, without communication: it plays all ranks, one after the other, on
copies of the unwrapped model. So a case draws its data from torch's generator, which is seeded by
rank and step, and asks for nothing else that differs between ranks but the ``rank`` it is given.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks
from torch import Tensor, nn

from tritonddp import DistributedDataParallel


@dataclass
class Window:
    """Weighted backwards that are reduced together.

    Attributes:
        sums: their gradients, each times its number of items, or as it is for a sum.
    """

    items: float = 0.0  # how many they count
    is_sum: bool = False  # their losses are sums over their items
    sums: dict[Tensor, Tensor] = field(default_factory=dict)


class Alone(nn.Module):
    """The unwrapped model, with the methods of a wrapped one.

    Attributes:
        windows: the weighted backwards of this rank, up to each one that is reduced.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True
        self.windows: list[Window] = []
        self._goes_on = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextlib.contextmanager
    def weighted(self, n: float, reduction: str = "mean") -> Iterator[None]:
        """Around one backward; with ``no_sync`` outside of it."""
        before = [(param, param.grad) for param in self.parameters()]
        for param in self.parameters():
            param.grad = None
        yield
        if not self._goes_on:
            self.windows.append(Window())
        self._goes_on = not self.require_backward_grad_sync
        window = self.windows[-1]
        window.items += n
        window.is_sum = reduction == "sum"
        for param, grad in before:
            if param.grad is not None:
                scale = n if reduction == "mean" else 1.0
                scaled = param.grad * scale if scale else torch.zeros_like(param.grad)
                total = window.sums.get(param)
                window.sums[param] = scaled if total is None else total + scaled
            param.grad = grad

    def reduce_gradients(self, gradients: Any = None, params: Any = None) -> Any:
        """The mean over ranks comes at the end."""
        if isinstance(gradients, Mapping):
            return {name: gradients.get(name) for name, _ in self.module.named_parameters()}
        return gradients


Net = Alone | DistributedDataParallel


def one_per_rank(module: nn.Module) -> list[Alone]:
    """Copies of the unwrapped model: what each rank would train alone."""
    return [Alone(copy.deepcopy(module)) for _ in range(dist.get_world_size())]


def seed(rank: int, step: int) -> None:
    """What ``rank`` draws in ``step``, whoever plays it."""
    # Not torch.manual_seed: it takes 1 ms to note its caller for devices that are not there.
    torch.default_generator.manual_seed(1000 * step + rank)


def play(
    step: Callable[[Net, int], object],
    ddp: DistributedDataParallel,
    alone: Sequence[Alone],
    number: int,
) -> None:
    """Step ``number``: alone in the role of each rank, then wrapped in that of this one."""
    for rank, net in [*enumerate(alone), (dist.get_rank(), ddp)]:
        seed(rank, number)
        step(net, rank)


def in_step(
    step: Callable[[Net, int], object],
    ddp: DistributedDataParallel,
    alone: Sequence[Alone],
    number: int,
) -> None:
    """:func:`play` it; gradients must agree."""
    play(step, ddp, alone, number)
    assert_mean(ddp, alone, f"step {number}")


def mean_over_ranks(alone: Sequence[nn.Module]) -> list[Tensor | None]:
    """The gradient that each parameter must have, given one unwrapped model per rank.

    A parameter that some ranks did not use counts as zero there. ``None`` where no rank has a
    gradient. What a rank has accumulated before its first weighted mean counts like that; what it
    had before its first weighted sum was reduced earlier.
    """
    windows = list(zip(*(getattr(model, "windows", ()) for model in alone), strict=True))
    means: list[Tensor | None] = []
    for params in zip(*(model.parameters() for model in alone), strict=True):
        terms = terms_of_mean(params, windows, len(alone))
        terms.sort(key=lambda term: term.is_sparse)  # torch adds them in this order only
        mean = sum(terms, torch.zeros_like(terms[0])) if terms else None
        means.append(None if mean is None else mean.to(params[0].dtype))
    return means


def terms_of_mean(
    params: Sequence[Tensor], windows: Sequence[Sequence[Window]], size: int
) -> list[Tensor]:
    """What adds up to the mean of the gradients of one parameter, in double precision.

    Args:
        params: the parameter on each rank.
        windows: weighted backwards, each on each rank.
        size: what a sum over the ranks is divided by where there are no weights.
    """
    is_mean = bool(windows) and not windows[0][0].is_sum
    counts = [window.items for window in windows[0]] if is_mean else [1.0] * len(params)
    pairs = zip(params, windows[0] if windows else (), strict=bool(windows))
    is_used = any(param in window.sums for param, window in pairs)
    if len(windows) == 1 and is_used and not any(window.items for window in windows[0]):
        counts = [0.0] * len(params)  # all weigh nothing: nothing is left
    total = sum(counts) if is_mean else size
    terms = [
        _wide(param.grad.detach()) * (count / total if total else 0.0)
        for param, count in zip(params, counts, strict=True)
        if param.grad is not None
    ]
    for window in windows:
        items = sum(each.items for each in window)
        terms += [
            _wide(each.sums[param]) * (1 / items if items else 0.0)
            for param, each in zip(params, window, strict=True)
            if param in each.sums
        ]
    return terms


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def assert_gradients(ddp: nn.Module, expected: Sequence[Tensor | None], what: str) -> None:
    """``.grad`` is as expected, to rounding in its dtype; what is sparse stays so."""
    for (name, param), mean in zip(ddp.named_parameters(), expected, strict=True):
        where = f"{what}: gradient of {name} on rank {dist.get_rank()}"
        if mean is None:
            assert param.grad is None, f"{where} was made, but no rank used the parameter"
            continue
        assert param.grad is not None, f"{where} is missing"
        assert param.grad.layout == mean.layout, where
        assert not mean.is_sparse or param.grad.is_coalesced(), where
        found, mean = (each.detach().to_dense() for each in (param.grad, mean))
        tolerance = 1e-12 if param.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(
            found,
            mean,
            rtol=tolerance,
            atol=tolerance * max(1.0, float(mean.abs().max()) if mean.numel() else 0.0),
            msg=lambda text, where=where: f"{where}: {text}",
        )


def assert_mean(ddp: nn.Module, alone: Sequence[nn.Module], what: str) -> None:
    """``ddp`` has the mean of the gradients of the unwrapped models, which then have it too."""
    expected = mean_over_ranks(alone)
    assert_gradients(ddp, expected, what)
    assert_same_on_all_ranks([param.grad for param in ddp.parameters()], what)
    adopt(alone, expected)


def adopt(alone: Sequence[nn.Module], expected: Sequence[Tensor | None]) -> None:
    """Give the unwrapped models the gradients that the wrapped one has after a reduction."""
    for model in alone:
        for param, mean in zip(model.parameters(), expected, strict=True):
            param.grad = None if mean is None else mean.clone()
        if isinstance(model, Alone):
            model.windows = []
