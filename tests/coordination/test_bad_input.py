"""What a rank gives wrong: an error on every rank, nothing half-done, the next step is right."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from distributed import assert_same_bits, ranks
from modules import linears
from torch import nn
from training import assert_gradients_alike, drawn, gradients, train_step

from tritonddp import DistributedDataParallel, Int8


def wide() -> nn.Module:
    torch.manual_seed(0)
    return linears(64, 64, 32)


def step(net: nn.Module, seed: int) -> None:
    train_step(net, drawn(3, 64, step=seed))


def raises(name: str, _: object) -> bool:
    raise KeyError(f"what the user said of {name}")


WRONG_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"compression": Int8(exact=raises)}, KeyError, "what the user said of 0.weight"),
    ({"compression": Int8(exact="9.weight")}, ValueError, "no parameter '9.weight'"),
    ({"bucket_cap_mb": -1}, ValueError, "zero or more, and finite, got -1 MiB"),
    ({"bucket_cap_mb": "x"}, TypeError, "number of MiB, got 'x'"),
    ({"metrics": "no"}, TypeError, "metrics should be"),
]


@ranks(2)
def test_an_option_that_is_wrong_on_one_rank_is_an_error_on_both(rank: int) -> None:
    for options, kind, said in WRONG_OPTIONS:
        with pytest.raises(RuntimeError) as caught:
            DistributedDataParallel(wide(), **{"compression": "int8", **(options if rank else {})})
        for part in ("rank 1 has", kind.__name__, said):
            assert part in str(caught.value)
    ddp = DistributedDataParallel(wide(), compression="int8")
    step(ddp, 0)
    assert_gradients_alike(ddp)


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {key: value for key, value in state.items() if key != name}


def replaced(**entries: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {**state, **entries}


def residuals(change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {**state, "sent": {k: change(v) for k, v in state["sent"].items()}}


# What becomes of a state, and the error on the rank that is given it.
WRONG_STATES: list[tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = [
    (lambda _: wide().state_dict(), TypeError, "takes what comm_state_dict()"),
    (lambda state: [state], TypeError, "takes what comm_state_dict()"),
    (without("bucket_order"), TypeError, "'bucket_order' is no list"),
    (without("weight_unit"), TypeError, "'weight_unit' is no number"),
    (replaced(weight_unit=float("nan")), ValueError, "'weight_unit' is nan"),
    (
        lambda state: {**state, "bucket_order": state["bucket_order"] * 2},
        ValueError,
        "names a parameter twice",
    ),
    (residuals(lambda each: each[1:]), ValueError, "residuals of shape (63,"),
    (residuals(lambda each: each * float("nan")), ValueError, "that are not finite"),
    (residuals(lambda each: each.to("meta")), TypeError, "no dictionary of dense tensors"),
    (residuals(torch.Tensor.int), TypeError, "tensors of floating point"),
]


@ranks(2)
def test_a_state_that_one_rank_cannot_read_is_loaded_on_none(rank: int) -> None:
    """Or ranks would have other buckets, and other residuals, than each other."""
    for victim, (change, kind, said) in itertools.product((0, 1), WRONG_STATES):
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
        wanted = said if here else f"load_comm_state_dict() failed on rank {victim}, and nothing"
        assert wanted in str(caught.value), caught.value
        after = ddp.comm_state_dict()
        assert after["bucket_order"] == state["bucket_order"]
        for name, left in state["sent"].items():
            assert_same_bits(after["sent"][name], left)
        step(ddp, 3)
        step(twin, 3)
        assert_same_bits(gradients(ddp), gradients(twin))
        ddp.load_comm_state_dict(state)


@ranks(2)
def test_a_flag_of_numpy_is_a_flag() -> None:
    ddp = DistributedDataParallel(wide(), gradient_as_bucket_view=np.bool_(True))
    step(ddp, 0)
    assert_gradients_alike(ddp)
