"""Wrong options, states and texts of one rank: an error on all ranks; training continues."""

import copy
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks
from launched import ROOT
from modules import linears
from torch import nn
from training import assert_gradients_alike, drawn, gradients, train_step

from tritonddp import DistributedDataParallel, Int8
from tritonddp.coordination.group import Group
from tritonddp.coordination.verify import verify_same


def wide() -> nn.Module:
    torch.manual_seed(0)
    return linears(64, 64, 32)


def step(net: nn.Module, seed: int) -> None:
    train_step(net, drawn(3, 64, step=seed))


def raises(name: str, _: object) -> bool:
    raise KeyError(f"text of the user for {name}")


WRONG_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"compression": Int8(exact=raises)}, KeyError, "text of the user for 0.weight"),
    ({"compression": Int8(exact="9.weight")}, ValueError, "matches '9.weight'"),
    ({"metrics": "no"}, TypeError, "metrics should be"),
]


@ranks(2)
def test_an_option_that_is_wrong_on_one_rank_is_an_error_on_both(rank: int) -> None:
    for options, kind, text in WRONG_OPTIONS:
        with pytest.raises(RuntimeError) as caught:
            DistributedDataParallel(wide(), **{"compression": "int8", **(options if rank else {})})
        for part in ("rank 1 has", kind.__name__, text):
            assert part in str(caught.value)
    ddp = DistributedDataParallel(wide(), compression="int8")
    step(ddp, 0)
    assert_gradients_alike(ddp)


def residuals(change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {**state, "sent": {k: change(v) for k, v in state["sent"].items()}}


# A change of a state, and the error on the rank that loads it.
WRONG_STATES: list[tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = [
    (lambda _: None, TypeError, "expects a state from comm_state_dict(), got None"),
    (lambda _: wide().state_dict(), TypeError, "expects a state from comm_state_dict()"),
    (lambda state: {**state, "bucket_order": 3}, TypeError, "'bucket_order' is not a list"),
    (lambda state: {**state, "weight_unit": None}, TypeError, "'weight_unit' is not a number"),
    (lambda state: {**state, "weight_unit": math.nan}, ValueError, "'weight_unit' is nan"),
    (
        lambda state: {**state, "bucket_order": state["bucket_order"] * 2},
        ValueError,
        "names a parameter twice",
    ),
    (residuals(lambda each: each[1:]), ValueError, "residuals of shape (63,"),
    (residuals(lambda each: each * float("nan")), ValueError, "non-finite residuals"),
    (residuals(torch.Tensor.int), TypeError, "dense floating-point tensors"),
]


@ranks(2)
def test_a_state_that_one_rank_cannot_load_is_loaded_on_no_rank(rank: int) -> None:
    """Otherwise the ranks would have different buckets and residuals."""
    for victim, (change, kind, text) in itertools.product((0, 1), WRONG_STATES):
        ddp = DistributedDataParallel(wide(), compression="int8", bucket_cap_mb=0.01)
        twin = copy.deepcopy(ddp)
        for seed in range(2):
            step(ddp, seed)
            step(twin, seed)
        state = ddp.comm_state_dict()
        other = DistributedDataParallel(wide(), compression="int8", bucket_cap_mb=0.02)
        step(other, 9)
        wrong = change(other.comm_state_dict())
        here = rank == victim
        with pytest.raises(kind if here else RuntimeError) as caught:
            ddp.load_comm_state_dict(wrong if here else other.comm_state_dict())
        wanted = text if here else f"load_comm_state_dict() failed on rank {victim}. Nothing"
        assert wanted in str(caught.value), caught.value
        after = ddp.comm_state_dict()
        assert after["bucket_order"] == state["bucket_order"]
        for name, left in state["sent"].items():
            assert_same_bits(after["sent"][name], left)
        step(ddp, 3)
        step(twin, 3)
        assert_same_bits(gradients(ddp), gradients(twin))
        ddp.load_comm_state_dict(state)


# Data of other ranks is not unpickled or executed, and cannot distort a message.


@pytest.mark.parametrize("folder", ["tritonddp", "examples", "benchmarks"])
def test_files_that_may_hold_code_are_not_loaded(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for call in re.findall(r"torch\.load\(.*\n?.*", path.read_text()):
            assert "weights_only=True" in call, f"{path}: {call}"


@ranks(2)
def test_a_text_of_another_rank_is_one_line_and_bounded(rank: int) -> None:
    hostile = "\x1b[2Jgone\n" * 10_000 if rank else "what it is"
    description = {"parameter": {}, "buffer": {}, "option": {"color": hostile}}
    with pytest.raises(RuntimeError, match="option 'color': rank 0 has what it is") as caught:
        verify_same(description, Group(dist.group.WORLD), torch.device("cpu"))
    heading, line, remedy = str(caught.value).splitlines()
    assert "\x1b" not in line
    assert len(line) < 1_100
    assert heading
    assert remedy
