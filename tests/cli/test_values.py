"""Gradients of two contenders: identical bits, rounding, or wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tritonddp.cli.comparison import values
from tritonddp.cli.comparison.values import DIFFERENT, IDENTICAL, ROUNDING, Captured, judge

# Captures the gradients of a model after some changes.
Take = Callable[..., Captured]


@pytest.fixture
def take(tmp_path: Path) -> Take:
    def captured(*changes: Any, other_rank: str | None = None) -> Captured:
        torch.manual_seed(0)
        model = nn.ModuleDict({"module": nn.Linear(20, 10)})  # stands for a wrapper
        model.module(torch.randn(4, 20)).square().sum().backward()
        for change in changes:
            change(model.module)
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        found = values.capture([model], "gradient", str(path))
        return {0: found, 1: {"digest": other_rank or found["digest"]}}

    return captured


def nothing(model: nn.Linear) -> None:
    """Change nothing."""


def last_bit(model: nn.Linear) -> None:
    model.weight.grad[1, 1].mul_(1 + 2**-22)


def wrong_bias(model: nn.Linear) -> None:
    model.bias.grad.mul_(1.01)


def infinity(model: nn.Linear) -> None:
    model.weight.grad[0, 0] = float("inf")


@pytest.mark.parametrize(
    ("both", "change", "state", "names"),
    [
        (nothing, nothing, IDENTICAL, []),
        (nothing, last_bit, ROUNDING, []),
        (nothing, wrong_bias, DIFFERENT, ["bias"]),
        (nothing, lambda m: m.bias.grad.fill_(float("nan")), DIFFERENT, ["bias"]),
        (nothing, lambda m: setattr(m.bias, "grad", None), DIFFERENT, ["bias"]),
        # Equal infinities hide no other difference.
        (infinity, last_bit, ROUNDING, []),
        (infinity, wrong_bias, DIFFERENT, ["bias"]),
        # The gradient of a bias before a normalization consists of rounding errors.
        (lambda m: m.bias.grad.fill_(1e-9), lambda m: m.bias.grad.neg_(), ROUNDING, []),
    ],
)
def test_a_difference_is_rounding_or_wrong_and_named(both, change, state, names, take):
    for step in (1, 2):
        found = judge(f"gradients of backward {step}", [(take(both), take(both, change))])
        assert (found.state, list(found.names)) == (state, names)
        assert found.is_wrong is (state == DIFFERENT)
        assert (found.largest == 0) is (state == IDENTICAL)


def test_two_launches_of_stock_show_that_a_script_is_not_deterministic(take: Take) -> None:
    def noise(model: nn.Linear) -> None:
        model.weight.grad.mul_(1.001)

    found = judge("", [(take(), take(noise, noise)), (take(noise), take(noise, noise))])
    assert found.of_stock == pytest.approx(0.001, rel=1e-3)
    assert found.state == ROUNDING


def test_ranks_that_differ_are_wrong_unless_those_of_stock_do_too(take: Take) -> None:
    same, apart = take(), take(other_rank="something else")
    found = judge("", [(same, apart)])
    assert (found.is_wrong, found.shared) == (True, (True, False))
    assert not judge("", [(apart, apart)]).is_wrong
