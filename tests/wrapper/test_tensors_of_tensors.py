"""Frozen parameters of tensor subclasses that consist of other tensors: quantized weights."""

import logging
from typing import Any

import pytest
import torch
from distributed import assert_same_on_all_ranks, ranks
from logged import logged
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision
from training import drawn, train_step, wrap

import tritonddp
from tritonddp.coordination import verify


class Opaque(Tensor):
    """Eight bits and a scale, which only its own layer knows."""

    @staticmethod
    def __new__(cls, bits: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, bits.shape, dtype=torch.float32)

    def __init__(self, bits: Tensor, scale: Tensor) -> None:
        self.bits, self.scale = bits, scale

    def plain(self) -> Tensor:
        return self.bits.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].bits, args[0].scale)
        raise NotImplementedError(f"{cls.__name__} has no {func}")


class Flat(Opaque):
    def __tensor_flatten__(self) -> Any:
        return ["bits", "scale"], None


class Nested(Flat):
    """Its scale is quantized once more."""

    def plain(self) -> Tensor:
        return self.bits.float() * self.scale.plain()


class Net(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        bits = torch.randint(-8, 8, (4, 4), dtype=torch.int8)
        scale = torch.rand(1)
        if kind is Nested:
            scale = Flat(torch.randint(1, 8, (1,), dtype=torch.int8), scale)
        self.weight = nn.Parameter(kind(bits, scale), requires_grad=False)
        self.lora = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.plain().to(x.dtype) + self.lora(x)


def net(kind: type, seed: int) -> Net:
    torch.manual_seed(seed)
    return Net(kind)


WAYS = {
    "wrapped": wrap,
    "in place": tritonddp.replicate,
    "mixed precision": lambda module: wrap(
        module, mixed_precision=_MixedPrecision(torch.bfloat16, torch.float32)
    ),
}


def train(ddp: nn.Module, module: Net) -> None:
    for step in range(3):
        train_step(ddp, drawn(3, 4, step=step))
        assert_same_on_all_ranks([module.lora.weight.grad])


@pytest.mark.parametrize("kind", [Flat, Nested])
@ranks(2)
def test_the_inner_tensors_are_sent_and_compared(rank: int, kind: type) -> None:
    for way in WAYS.values():
        module = net(kind, seed=rank)
        ddp = way(module)
        assert_same_on_all_ranks([module.weight.plain()])
        train(ddp, module)
        ddp.check_sync()
        module.weight.bits[0, 0] += rank
        with pytest.raises(RuntimeError, match=r"parameter 'weight\.bits' .*int8: rank 0"):
            ddp.check_sync()


@ranks(2)
def test_an_inner_tensor_of_another_shape_is_named(rank: int) -> None:
    module = net(Flat, 0)
    module.weight.scale = torch.ones(1 + rank)
    with pytest.raises(RuntimeError, match=r"'weight\.scale'.*\(1,\).*\(2,\)"):
        wrap(module)


@ranks(2)
def test_an_opaque_tensor_stays_rank_local_and_the_log_names_it_once(rank: int) -> None:
    verify._left_alone.clear()
    with logged(logging.WARNING) as kept:
        for way in WAYS.values():
            module = net(Opaque, seed=rank)
            own = module.weight.plain()
            ddp = way(module)
            train(ddp, module)
            ddp.check_sync()
            assert torch.equal(module.weight.plain(), own)
    (line,) = kept.lines("verify")
    assert line.startswith("'weight' is a Opaque without __tensor_flatten__")
