"""Module buffers come from rank 0 when stock DDP would bring them, and as they are there."""

import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import (
    assert_same_bits,
    assert_same_on_all_ranks,
    gather,
    ranks,
    recorded_collectives,
    sequence_number,
)
from modules import normed
from torch import Tensor, nn
from training import unwarned

from tritonddp import DistributedDataParallel


def batch() -> Tensor:
    return torch.randn(5, 3) * (1 + dist.get_rank()) + dist.get_rank()


def copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def flagged(imaginary: bool) -> Tensor:
    """A tensor that is flagged as conjugate, or as negative, of which no copy has been made."""
    conjugate = torch.full((1,), complex(2, dist.get_rank() + 3)).conj()
    return conjugate.imag if imaginary else conjugate


# What somebody may do to the buffer `scale`, or to its module, between two forwards.
CHANGES: dict[str, Any] = {
    "same": lambda module: None,
    "another tensor": lambda module: setattr(module, "scale", torch.ones(4)),
    "another dtype in place": lambda module: setattr(module.scale, "data", module.scale.half()),
    "another dtype of the module": lambda module: module.double(),
    "longer": lambda module: module.scale.resize_(9),
    "shorter, where it was": lambda module: module.scale.resize_(2),
    "a part of itself": lambda module: setattr(module.scale, "data", module.scale[1:3]),
    "elsewhere": lambda module: setattr(module.scale, "data", module.scale.clone()),
    "transposed where it is": lambda module: module.scale.resize_(2, 3).t_(),
    "one of two": lambda module: setattr(module, "scale", torch.ones(2).double()[::2]),
    "nothing": lambda module: setattr(module, "scale", None),
    "empty": lambda module: module.scale.resize_(0),
    "named anew": lambda module: module.register_buffer("other", module._buffers.pop("scale")),
    "shared": lambda module: setattr(module[0], "scale", module.scale),
    "conjugate": lambda module: setattr(module, "scale", flagged(imaginary=False)),
    "negative": lambda module: setattr(module, "scale", flagged(imaginary=True)),
}


@ranks(2)
def test_a_buffer_is_sent_as_it_is_at_the_forward_whatever_it_was_before(rank: int) -> None:
    for what, change in CHANGES.items():
        module = normed()
        module.register_buffer("scale", torch.zeros(4))
        module[0].register_buffer("scale", torch.zeros(1))
        ddp = DistributedDataParallel(module)
        for _ in range(2):
            change(module)
            with torch.no_grad():
                for buffer in module.buffers():
                    buffer.copy_(torch.arange(buffer.numel()).view(buffer.shape))
                    buffer += rank
                state = copies(module)
                kinds = {name: (b.dtype, b.stride()) for name, b in module.named_buffers()}
            ddp.require_forward_param_sync = True
            ddp._sync_buffers()
            assert_same_bits(copies(module), gather(state)[0], what)
            assert kinds == {name: (b.dtype, b.stride()) for name, b in module.named_buffers()}
            module.register_buffer("scale", torch.zeros(4))
            module._buffers.pop("other", None)


def counted(function: Any) -> int:
    """Functions that a call calls, in Python and in C, beside what the collector may happen to."""
    counts = []

    def note(frame: Any, event: str, _: Any) -> None:
        counts[-1] += event in ("call", "c_call")

    for _ in range(5):
        counts.append(0)
        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(None)
    return min(counts)


@ranks(2)
def test_a_steady_forward_calls_one_function_a_buffer_which_is_torchs() -> None:
    """(Torch never forgets the optimizers in the backward of an earlier test.)"""
    counts = []
    for layers in (10, 60):
        norms = [nn.BatchNorm1d(4) for _ in range(layers)]
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), *norms).eval())
        ddp.module.forward = lambda x: x

        def forward(ddp: Any = ddp) -> None:
            ddp.require_forward_param_sync = True
            ddp(batch())

        hooks = "tritonddp.features.optimizer_in_backward.optimizer_hooks"
        with mock.patch(hooks, return_value=None):
            counts.append(counted(forward))
    per_buffer = (counts[1] - counts[0]) / (3 * 50)
    # What preserves version counters looks at each.
    assert per_buffer <= 1.01, counts


@ranks(2)
def test_large_buffers_go_in_several_messages(rank: int) -> None:
    module = normed().eval()
    ddp = DistributedDataParallel(module)
    module[1].running_mean.add_(rank)
    ddp.broadcast_bucket_size = 16
    before = sequence_number()
    ddp(batch())
    assert sequence_number() - before > 1
    assert_same_on_all_ranks([module[1].running_mean])


# Options, and whether buffers are rank 0's after construction and after a forward.
OPTIONS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "nothing": ({}, True, True),
    "forward off": ({"forward_sync_buffers": False}, True, False),
    "broadcast off": ({"broadcast_buffers": False}, False, False),
    "forward on, broadcast off": (
        {"forward_sync_buffers": True, "broadcast_buffers": False},
        True,
        True,
    ),
    "no init": ({"init_sync": False}, False, True),
}


@ranks(2)
def test_options_say_where_buffers_are_synchronized(rank: int) -> None:
    for what, (options, at_construction, at_forward) in OPTIONS.items():
        torch.manual_seed(rank)
        module = normed()
        module.register_buffer("count", torch.tensor(rank))
        warns = pytest.warns(FutureWarning, match="broadcast_buffers")
        with warns if "broadcast_buffers" in options else unwarned():
            ddp = DistributedDataParallel(module, **options)
        assert module.count.item() == (0 if at_construction else rank), what
        module.count.fill_(rank)
        ddp.module.forward = lambda x: x
        with recorded_collectives() as calls:
            for _ in range(3):
                ddp(batch())
            assert bool(calls.on_the_group) is at_forward, what
        assert module.count.item() == (0 if at_forward else rank), what
        assert ddp.forward_sync_buffers is ddp.broadcast_buffers is at_forward, what
        weight = gather(module[0].weight)
        assert torch.equal(*weight) is options.get("init_sync", True), what
