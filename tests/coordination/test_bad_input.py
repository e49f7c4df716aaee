"""What a rank gives wrong: an error on every rank, nothing half-done, the next step is right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks, gather, ranks
from torch import nn

from tritonddp import DistributedDataParallel


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))


def step(net: nn.Module, seed: int) -> None:
    net.zero_grad()
    inputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed + dist.get_rank()))
    net(inputs).pow(2).sum().backward()


def raises(name: str, _: object) -> bool:
    raise KeyError(f"what the user said of {name}")


WRONG_OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "function that raises": ({"exact": raises}, KeyError, "what the user said of 0.weight"),
    "name of no parameter": ({"exact": "9.weight"}, ValueError, "no parameter '9.weight'"),
    "size below zero": ({"bucket_cap_mb": -1}, ValueError, "positive and finite, got -1 MiB"),
    "size that is none": ({"bucket_cap_mb": "x"}, TypeError, "number of MiB, got 'x'"),
    "flag that is none": ({"error_feedback": "no"}, TypeError, "error_feedback should be"),
}


@pytest.mark.parametrize("case", list(WRONG_OPTIONS))
@ranks(2)
def test_an_option_that_is_wrong_on_one_rank_is_an_error_on_both(case: str) -> None:
    options, kind, said = WRONG_OPTIONS[case]
    here = dist.get_rank() == 1
    with pytest.raises(RuntimeError) as caught:
        DistributedDataParallel(wide(), compression="int8", **(options if here else {}))
    for part in ("rank 1 has", kind.__name__, said):
        assert part in str(caught.value)
    ddp = DistributedDataParallel(wide(), compression="int8")
    step(ddp, 0)
    assert_same_on_all_ranks([param.grad for param in ddp.parameters()])


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {key: value for key, value in state.items() if key != name}


def replaced(**entries: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {**state, **entries}


def residuals(change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {**state, "sent": {k: change(v) for k, v in state["sent"].items()}}


WRONG_STATES: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "of a module": (lambda _: wide().state_dict(), TypeError, "takes what comm_state_dict()"),
    "no dictionary": (lambda state: [state], TypeError, "takes what comm_state_dict()"),
    "truncated": (without("bucket_order"), TypeError, "'bucket_order' is no list"),
    "without numbers": (without("weight_unit"), TypeError, "'weight_unit' is no number"),
    "not a number": (
        replaced(reductions_since_change=float("nan")),
        ValueError,
        "'reductions_since_change' is nan",
    ),
    "doubled": (
        lambda state: {**state, "bucket_order": state["bucket_order"] * 2},
        ValueError,
        "names a parameter twice",
    ),
    "of another shape": (residuals(lambda each: each[1:]), ValueError, "residuals of shape (63,"),
    "NaN": (residuals(lambda each: each * float("nan")), ValueError, "that are not finite"),
    "without values": (
        residuals(lambda each: each.to("meta")),
        TypeError,
        "no dictionary of dense tensors",
    ),
    "of whole numbers": (residuals(torch.Tensor.int), TypeError, "tensors of floating point"),
}


@pytest.mark.parametrize("case", list(WRONG_STATES))
@ranks(2)
def test_a_state_that_one_rank_cannot_read_is_loaded_on_none(case: str) -> None:
    """Or ranks would have other buckets, and other residuals, than each other."""
    change, kind, said = WRONG_STATES[case]
    for victim in (0, 1):
        ddp = DistributedDataParallel(wide(), compression="int8", bucket_cap_mb=0.01)
        twin = copy.deepcopy(ddp)
        for seed in range(2):
            step(ddp, seed)
            step(twin, seed)
        state = ddp.comm_state_dict()
        other = DistributedDataParallel(wide(), compression="int8", bucket_cap_mb=0.02)
        step(other, 9)
        wrong = change(other.comm_state_dict())
        here = dist.get_rank() == victim
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
        for param, same in zip(ddp.parameters(), twin.parameters(), strict=True):
            assert_same_bits(param.grad, same.grad)
        ddp.load_comm_state_dict(state)


@ranks(2)
def test_names_that_another_model_has_are_passed_over() -> None:
    ddp = DistributedDataParallel(wide(), compression="int8")
    step(ddp, 0)
    state = ddp.comm_state_dict()
    renamed = {**state, "bucket_order": [f"old.{name}" for name in state["bucket_order"]]}
    renamed["sent"] = {f"old.{name}": left for name, left in state["sent"].items()}
    ddp.load_comm_state_dict(renamed)
    step(ddp, 1)
    assert_same_on_all_ranks([param.grad for param in ddp.parameters()])


@ranks(2)
def test_a_wrong_request_on_every_rank_sends_nothing() -> None:
    ddp = DistributedDataParallel(wide())
    step(ddp, 0)
    before = ddp.reducer.counters.collectives
    weight = ddp.module[0].weight
    for gradients, params in [
        ("text", None),
        ([weight.new_ones(3)], None),
        ([None] * 4, 5),
        ([weight], [None]),
        ({"0.weight": weight.new_ones(64, 63)}, None),
        ({"0.weight": weight.new_ones(64, 64).double()}, None),
        ({"9.weight": weight}, None),
    ]:
        with pytest.raises((TypeError, ValueError)):
            ddp.reduce_gradients(gradients, params)
    assert ddp.reducer.counters.collectives == before
    alone = copy.deepcopy(ddp.module)
    step(ddp, 1)
    step(alone, 1)
    for param, own in zip(ddp.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.grad, sum(gather(own.grad)) / 2)


class Fails(torch.autograd.Function):
    """A function of the user, whose backward raises."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *__: torch.Tensor) -> Any:
        raise ArithmeticError("what the user said")


@pytest.mark.parametrize("who", [[0, 1], [1]], ids=["all", "one"])
@pytest.mark.parametrize(
    "options", [{}, {"compression": "int8"}, {"reduce_dtype": torch.bfloat16}], ids=str
)
@ranks(2)
def test_after_a_function_that_raises_in_a_backward_the_next_step_is_right(
    options: dict[str, Any], who: list[int]
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
            self.fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.last(Fails.apply(x) if self.fails else x)

    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.01, **options)
    alone = copy.deepcopy(ddp.module)
    for broken in (0, 2):
        for seed in range(broken, broken + 2):
            ddp.module.fails = seed == broken and dist.get_rank() in who
            if ddp.module.fails:
                with pytest.raises(ArithmeticError, match="what the user said"):
                    step(ddp, seed)
            else:
                step(ddp, seed)
        step(alone, broken + 1)
        for param, own in zip(ddp.parameters(), alone.parameters(), strict=True):
            wanted = sum(gather(own.grad)) / 2
            error = 0.05 * wanted.abs().max().item() if options else 1e-4
            torch.testing.assert_close(param.grad, wanted, rtol=0, atol=error)
        assert_same_on_all_ranks([param.grad for param in ddp.parameters()])


@ranks(2)
def test_a_flag_of_numpy_is_a_flag() -> None:
    ddp = DistributedDataParallel(wide(), gradient_as_bucket_view=np.bool_(True))
    step(ddp, 0)
    assert_same_on_all_ranks([param.grad for param in ddp.parameters()])
