"""Helpers for training in tests: inputs of each rank, steps, and comparisons of gradients.

ddp = wrap(mlp(4, 8, 2), view)
for number in range(3):
    train_step(ddp, drawn(5, 4, step=number))
assert_right_step(ddp, drawn(5, 4, step=3))
"""

import copy
import os
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, gather
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils._python_dispatch import TorchDispatchMode

from tritonddp import DistributedDataParallel
from tritonddp.coordination.counters import Counters

# For each rank, in the trailer of the first bucket.
HEADER_BYTES = 16

# Inputs


def drawn(*shape: int, step: int = 0, rank: int | None = None, dtype: Any = None) -> Tensor:
    """Random inputs of ``rank`` (by default this rank) in ``step``."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*shape, generator=generator, dtype=dtype)


def filled(*shape: int, requires_grad: bool = False) -> Tensor:
    """A tensor full of ones on rank 0, of twos on rank 1, and so on."""
    return torch.full(shape, 1.0 + dist.get_rank(), requires_grad=requires_grad)


# Models


def wrap(module: nn.Module, view: bool = False, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, gradient_as_bucket_view=view, **options)


def beside_stock(module: nn.Module, **options: Any) -> tuple[DistributedDataParallel, Stock]:
    """The module in tritonddp's wrapper, and a copy of it in stock DDP."""
    return DistributedDataParallel(module, **options), Stock(copy.deepcopy(module), **options)


def delayed(module: nn.Module, *names: str, until: Tensor) -> dict[str, Any]:
    """Options of a wrapper: send these gradients last, once the gradient of ``until`` is ready."""
    params = [(name, module.get_parameter(name)) for name in names]
    return {"delay_all_reduce_named_params": params, "param_to_hook_all_reduce": until}


# Options that change how gradients are sent and stored.
WAYS: dict[str, dict[str, Any]] = {
    "copies": {},
    "views": {"gradient_as_bucket_view": True},
    "lazy": {"lazy_bucket_allocation": True},
    "lazy views": {"lazy_bucket_allocation": True, "gradient_as_bucket_view": True},
    "process group": {"transport": "process_group"},
    "bf16": {"reduce_dtype": torch.bfloat16},
    "bf16 views": {"reduce_dtype": torch.bfloat16, "gradient_as_bucket_view": True},
    "fp16": {"reduce_dtype": torch.float16},
    "int8": {"compression": "int8"},
    "mixed": {"mixed_precision": _MixedPrecision(torch.bfloat16, torch.float32)},
    "finite": {"check_finite": "warn"},
}


def ways(*names: str) -> dict[str, dict[str, Any]]:
    """Some of ``WAYS``."""
    return {name: WAYS[name] for name in names}


# Steps


def squares(outputs: Tensor) -> Tensor:
    return outputs.square().sum()


def train_step(
    net: nn.Module, *inputs: Any, loss: Callable[[Tensor], Tensor] = squares, **options: Any
) -> Tensor:
    """Set the gradients to those of the ``loss`` of the outputs, and return the outputs."""
    net.zero_grad()
    outputs = net(*inputs, **options)
    loss(outputs).backward()
    return outputs


def descend(net: nn.Module, rate: float = 0.1) -> None:
    """One step of gradient descent. The gradients are kept."""
    with torch.no_grad():
        for param in net.parameters():
            if param.grad is not None:
                param -= rate * param.grad


def gradients(net: nn.Module) -> list[Tensor | None]:
    """Copies of the gradients, in the order of the parameters."""
    grads = [param.grad for param in net.parameters()]
    return [None if grad is None else grad.detach().clone() for grad in grads]


@contextmanager
def counted(ddp: DistributedDataParallel) -> Iterator[Counters]:
    """Context: count its launches, collectives and bytes. The counters are set at its end."""
    before, found = copy.copy(ddp.reducer.counters), Counters()
    yield found
    for name, value in vars(ddp.reducer.counters).items():
        setattr(found, name, value - getattr(before, name))


class Operators(TorchDispatchMode):
    """Counts the operators that run on this thread, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context: new tensors have this dtype by default."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(former)


@contextmanager
def in_folder() -> Iterator[None]:
    """Context: the working directory is a new folder, which is deleted at the end."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def in_threads(*calls: Callable[[], Any]) -> None:
    """Run each call in its own thread, and raise the first error here."""
    errors: list[BaseException] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


# Errors


def raises_if(
    condition: bool, error: type[BaseException], match: str | None = None
) -> AbstractContextManager[Any]:
    """``pytest.raises`` if the condition holds, for example on one rank."""
    return pytest.raises(error, match=match) if condition else nullcontext()


def fail(*_: Any) -> Any:
    """A hook of a gradient that ends the backward."""
    raise ZeroDivisionError


@contextmanager
def breaking_off(at: Tensor, condition: bool = True) -> Iterator[None]:
    """Context: if the condition holds, a backward inside fails at the gradient of ``at``."""
    handle = at.register_hook(fail) if condition else None
    with raises_if(condition, ZeroDivisionError):
        yield
    if handle is not None:
        handle.remove()


class Failing(torch.autograd.Function):
    """``Failing.apply(x)`` is ``x``, and its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ArithmeticError("on purpose")


@contextmanager
def warned() -> Iterator[list[str]]:
    """Context: collect all warnings. Warnings of tritonddp must name its files."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    ours = [each for each in caught if each.category is RuntimeWarning]
    assert all("tritonddp" in each.filename for each in ours)  # for filters by module
    messages += [str(each.message) for each in ours]


@contextmanager
def unwarned() -> Iterator[None]:
    """Context: a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# Comparisons of gradients


def means(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Means over the ranks. ``None`` counts as zero; without any tensor the mean is ``None``."""
    found: list[Tensor | None] = []
    here = [None if each is None else each.detach() for each in tensors]
    for row in zip(*gather(here), strict=True):
        total = sum(each for each in row if each is not None)
        found.append(total / len(row) if isinstance(total, Tensor) else None)
    return found


def assert_close(actual: Any, expected: Any, what: str = "", **tolerance: Any) -> None:
    """Tensors, or lists of tensors and ``None``, are equal up to rounding."""
    torch.testing.assert_close(actual, expected, msg=lambda text: f"{what}: {text}", **tolerance)


def assert_gradients_alike(ddp: nn.Module, what: str = "") -> None:
    """The gradients have the same bits on all ranks."""
    assert_same_on_all_ranks([param.grad for param in ddp.parameters()], what)


def assert_mean_of(ddp: nn.Module, alone: nn.Module, what: str = "", **tolerance: Any) -> None:
    """The gradients are the means over the ranks of the gradients of ``alone``, on all ranks."""
    pairs = zip(gradients(ddp), means(gradients(alone)), strict=True)
    for number, (grad, mean) in enumerate(pairs):
        assert_close(grad, mean, f"{what}, gradient {number}", **tolerance)
    assert_gradients_alike(ddp, what)


def assert_right_step(ddp: nn.Module, *inputs: Any, **tolerance: Any) -> None:
    """After another step, the gradients are the means of the gradients of an unwrapped copy."""
    alone = copy.deepcopy(ddp.module)
    for net in (ddp, alone):
        train_step(net, *inputs)
    assert_mean_of(ddp, alone, **tolerance)


def left_of(states: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """The sums over all ranks of the residuals in ``comm_state_dict()``, in fp64."""
    total: dict[str, Tensor] = {}
    for state in states:
        for kind in ("sent", "reduced"):
            for name, tensor in state[kind].items():
                total[name] = total.get(name, 0) + tensor.double() * state["weight_unit"]
    return total
