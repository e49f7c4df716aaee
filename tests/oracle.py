"""The oracle: the means over the ranks of the gradients of unwrapped models.

Every rank computes them without communication. It runs the steps of all ranks, one after the other,
on copies of the unwrapped model. So a step may only depend on its argument ``rank`` and on torch's
generator, which is seeded by rank and step.
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
        items: the number of items of all backwards.
        is_sum: the losses are sums over the items.
        sums: the sums of the gradients, for means multiplied by the numbers of items.
    """

    items: float = 0.0
    is_sum: bool = False
    sums: dict[Tensor, Tensor] = field(default_factory=dict)


class Alone(nn.Module):
    """The unwrapped model, with methods of the wrapper.

    Attributes:
        windows: the weighted backwards of this rank, grouped by the reduction that follows.
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
        """For one backward, inside ``no_sync`` if it is local."""
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
        """Return the local gradients. :func:`mean_over_ranks` computes the means."""
        if isinstance(gradients, Mapping):
            return {name: gradients.get(name) for name, _ in self.module.named_parameters()}
        return gradients


Net = Alone | DistributedDataParallel
Step = Callable[[Net, int], object]  # a step of a rank


def one_per_rank(module: nn.Module) -> list[Alone]:
    """A copy of the unwrapped model for each rank."""
    return [Alone(copy.deepcopy(module)) for _ in range(dist.get_world_size())]


def seed(rank: int, step: int) -> None:
    """Seed torch's generator for the step of a rank."""
    # Faster than torch.manual_seed, which takes 1 ms.
    torch.default_generator.manual_seed(1000 * step + rank)


def play(step: Step, ddp: Any, alone: Sequence[Alone], number: int) -> None:
    """Step ``number``: with the unwrapped model of each rank, then with the wrapper."""
    for rank, net in [*enumerate(alone), (dist.get_rank(), ddp)]:
        seed(rank, number)
        step(net, rank)


def in_step(step: Step, ddp: Any, alone: Sequence[Alone], number: int) -> None:
    """:func:`play` a step. The gradients must match."""
    play(step, ddp, alone, number)
    assert_mean(ddp, alone, f"step {number}")


def mean_over_ranks(alone: Sequence[nn.Module]) -> list[Tensor | None]:
    """Return the expected gradients, given the unwrapped model of each rank.

    A missing gradient counts as zero. The mean is ``None`` if all ranks miss it. Gradients before
    the first weighted mean count like it. Gradients before the first weighted sum were reduced
    earlier.
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
    """Return the terms of the mean of the gradients of one parameter, in double precision.

    Args:
        params: the parameter on each rank.
        windows: the windows of all ranks, for each reduction.
        size: the divisor if there are no weights.
    """
    is_mean = bool(windows) and not windows[0][0].is_sum
    counts = [window.items for window in windows[0]] if is_mean else [1.0] * len(params)
    pairs = zip(params, windows[0] if windows else (), strict=bool(windows))
    is_used = any(param in window.sums for param, window in pairs)
    if len(windows) == 1 and is_used and not any(window.items for window in windows[0]):
        counts = [0.0] * len(params)  # all weights are zero
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
    """Each gradient has the expected value, up to rounding, layout and strides."""
    for (name, param), mean in zip(ddp.named_parameters(), expected, strict=True):
        where = f"{what}: gradient of {name} on rank {dist.get_rank()}"
        if mean is None:
            assert param.grad is None, f"{where} was made, but no rank used the parameter"
            continue
        assert param.grad is not None, f"{where} is missing"
        assert param.grad.layout == mean.layout, where
        assert not mean.is_sparse or param.grad.is_coalesced(), where
        found, mean = (each.detach().to_dense() for each in (param.grad, mean))
        # The stride of a dimension of one element has no meaning.
        assert found.squeeze().stride() == mean.squeeze().stride(), f"strides of {where}"
        tolerance = 1e-12 if param.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(
            found,
            mean,
            rtol=tolerance,
            atol=tolerance * max(1.0, float(mean.abs().max()) if mean.numel() else 0.0),
            msg=lambda text, where=where: f"{where}: {text}",
        )


def assert_mean(ddp: nn.Module, alone: Sequence[nn.Module], what: str) -> None:
    """``ddp`` has the means of the gradients of ``alone``, whose gradients are then replaced."""
    expected = mean_over_ranks(alone)
    assert_gradients(ddp, expected, what)
    assert_same_on_all_ranks([param.grad for param in ddp.parameters()], what)
    adopt(alone, expected)


def adopt(alone: Sequence[nn.Module], expected: Sequence[Tensor | None]) -> None:
    """Set the gradients of the unwrapped models to the means, after a reduction."""
    for model in alone:
        for param, mean in zip(model.parameters(), expected, strict=True):
            param.grad = None if mean is None else mean.clone()
        if isinstance(model, Alone):
            model.windows = []
