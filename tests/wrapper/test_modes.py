"""What wrapping or the first forward makes for later steps is of use, whatever mode it runs in."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, ranks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from training import assert_close, default_dtype, drawn, gradients
from versions import HAS_FAKE_COLLECTIVES

from tritonddp import DistributedDataParallel


class Functions(TorchFunctionMode):
    """Makes tensors of another dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.double() if type(made) is Tensor and made.dtype is torch.float32 else made


class Operations(TorchDispatchMode):
    """Makes tensors without memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_new = type(made) is Tensor and func.namespace == "aten" and not func.is_view
        return made.to("meta") if is_new and not func._schema.is_mutable else made


@contextlib.contextmanager
def default_device(device: str) -> Any:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "functions": Functions,
    "operations": Operations,
}
if HAS_FAKE_COLLECTIVES:
    MODES["fake"] = lambda: FakeTensorMode(allow_non_fake_inputs=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "memory": {},
    "process group": {"transport": "process_group"},
    "int8": {"compression": "int8"},
}


class Net(nn.Module):
    """Two buffers that a forward changes, and gradients that are large and small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Linear(300, 4))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return self.layers(x)


def train(ddp: Any, steps: int = 4) -> list[Any]:
    """With buffers that each rank sets otherwise, which those of rank 0 replace."""
    found = []
    for number in range(steps):
        ddp.zero_grad()
        if number:  # as in stock, not in the first forward after one without gradients
            ddp.module.count.add_(dist.get_rank())
        ddp(drawn(6, 8, step=number)).square().sum().backward()
        found += [*gradients(ddp), *(each.clone() for each in ddp.module.buffers())]
        with torch.no_grad():
            for param in ddp.parameters():
                param -= 0.01 * param.grad
    return found


@pytest.mark.parametrize("option", OPTIONS)
@ranks(2)
def test_a_first_forward_in_a_mode_leaves_nothing_behind(option: str) -> None:
    wanted = train(DistributedDataParallel(Net(), **OPTIONS[option]))
    for mode, context in MODES.items():
        for after in (0, 2):  # the buckets are those of the beginning, or those that stay
            ddp = DistributedDataParallel(Net(), **OPTIONS[option])
            train(ddp, after)
            ddp.eval()
            x = drawn(6, 8)
            with context(), contextlib.suppress(Exception):  # what it computes there is no matter
                ddp(x)
            ddp.train()
            for number, (one, other) in enumerate(zip(train(ddp), wanted, strict=True)):
                if not after:
                    assert_close(one, other, f"{mode}, after {after}, {number}")
            assert_same_on_all_ranks(list(ddp.parameters()), f"{mode}, after {after}")


@pytest.mark.parametrize("option", OPTIONS)
@ranks(2)
def test_wrapping_in_a_mode_is_wrapping_outside(option: str) -> None:
    wanted = train(DistributedDataParallel(Net(), **OPTIONS[option]))
    for mode in ("inference_mode", "no_grad", "float64", "bfloat16", "device", "default device"):
        module = Net()
        with MODES[mode]():
            ddp = DistributedDataParallel(module, **OPTIONS[option])
        for number, (one, other) in enumerate(zip(train(ddp), wanted, strict=True)):
            assert_close(one, other, f"{mode}, {number}")


@ranks(2)
def test_a_first_forward_in_a_transform_leaves_nothing_behind() -> None:
    wanted = train(DistributedDataParallel(Net()))
    for options in OPTIONS["memory"], OPTIONS["process group"]:
        for transform in (torch.func.vmap, torch.func.grad):
            ddp = DistributedDataParallel(Net(), **options).eval()
            params = {name: each.detach() for name, each in ddp.named_parameters()}
            if transform is torch.func.vmap:
                params = {name: torch.stack([each, each]) for name, each in params.items()}

            def loss(params: Any, ddp: Any = ddp) -> Tensor:
                return functional_call(ddp, params, (torch.ones(6, 8),)).sum()

            transform(loss)(params)
            ddp.train()
            assert_close(train(ddp), wanted, transform.__name__)
