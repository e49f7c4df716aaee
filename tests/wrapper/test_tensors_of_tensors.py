"""Frozen parameters of tensor subclasses with inner tensors, such as quantized weights."""

import logging
from functools import partial
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
    """Eight bits and a scale, without ``__tensor_flatten__``."""

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


class Net(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        bits = torch.randint(-8, 8, (4, 4), dtype=torch.int8)
        self.weight = nn.Parameter(kind(bits, torch.rand(1)), requires_grad=False)
        self.lora = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.plain().to(x.dtype) + self.lora(x)


def net(kind: type, seed: int) -> Net:
    torch.manual_seed(seed)
    return Net(kind)


def train(ddp: nn.Module, module: Net) -> None:
    for step in range(3):
        train_step(ddp, drawn(3, 4, step=step))
        assert_same_on_all_ranks([module.lora.weight.grad])


@ranks(2)
def test_the_inner_tensors_are_sent_and_compared(rank: int) -> None:
    mixed = _MixedPrecision(torch.bfloat16, torch.float32)
    for way in (tritonddp.replicate, partial(wrap, mixed_precision=mixed)):
        module = net(Flat, seed=rank)
        ddp = way(module)
        assert_same_on_all_ranks([module.weight.plain()])
        train(ddp, module)
        ddp.check_sync()
        module.weight.bits[0, 0] += rank
        with pytest.raises(RuntimeError, match=r"parameter 'weight\.bits' .*int8: rank 0"):
            ddp.check_sync()


@ranks(2)
def test_an_opaque_tensor_stays_rank_local_and_the_log_names_it_once(rank: int) -> None:
    verify._left_alone.clear()
    with logged(logging.WARNING) as kept:
        for way in (wrap, tritonddp.replicate):
            module = net(Opaque, seed=rank)
            own = module.weight.plain()
            ddp = way(module)
            train(ddp, module)
            ddp.check_sync()
            assert torch.equal(module.weight.plain(), own)
    (line,) = kept.lines("verify")
    assert line.startswith("'weight' is a Opaque without __tensor_flatten__")
