"""Gradients of two contenders beside each other: same bits, rounding, or wrong."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tritonddp.cli.comparison.values import (
    DIFFERENT,
    IDENTICAL,
    ROUNDING,
    Captured,
    Finding,
    capture,
    judge,
)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(20, 10)
    linear(torch.randn(4, 20)).square().sum().backward()
    return linear


def taken(model: nn.Module, folder: Path, others: tuple[str, ...] = ()) -> Captured:
    path = folder / str(len(list(folder.iterdir())))
    found = capture([Wrapper(model)], "gradient", str(path))
    digests = others or (found["digest"],)
    return {0: found, **{rank: {"digest": each} for rank, each in enumerate(digests, start=1)}}


def judged(
    *captures: Captured, title: str = "gradients of step 1", second: Captured | None = None
) -> Finding:
    first, other = captures
    if second is None:
        return judge(title, [(first, other)])
    return judge(title, [(first, other), (second, other)])


def test_the_same_bits(model: nn.Linear, tmp_path: Path) -> None:
    found = judged(taken(model, tmp_path), taken(model, tmp_path))
    assert (found.state, found.largest, found.is_wrong) == (IDENTICAL, 0, False)


def test_a_last_bit_is_rounding(model: nn.Linear, tmp_path: Path) -> None:
    before = taken(model, tmp_path)
    model.weight.grad[0, 0].mul_(1 + 2**-22)
    found = judged(before, taken(model, tmp_path))
    assert found.state == ROUNDING
    assert 0 < found.largest < 1e-6
    assert not found.is_wrong


@pytest.mark.parametrize("step", [1, 2])
def test_one_wrong_gradient_is_found_and_named(model: nn.Linear, tmp_path: Path, step: int) -> None:
    before = taken(model, tmp_path)
    model.bias.grad.mul_(1.01)
    found = judged(before, taken(model, tmp_path), title=f"gradients of step {step}")
    assert (found.state, list(found.names), found.is_wrong) == (DIFFERENT, ["bias"], True)
    assert found.largest == pytest.approx(0.01, rel=1e-3)


def test_what_is_wrong_in_one_launch_alone_is_found(model: nn.Linear, tmp_path: Path) -> None:
    right = taken(model, tmp_path)
    model.bias.grad.mul_(1.01)
    wrong = taken(model, tmp_path)
    found = judge("gradients of step 1", [(right, right)] * 2 + [(right, wrong)])
    assert (found.state, list(found.names)) == (DIFFERENT, ["bias"])


@pytest.mark.parametrize("value", [float("nan"), None])
def test_a_gradient_that_is_missing_or_not_a_number_is_wrong(
    model: nn.Linear, tmp_path: Path, value: float | None
) -> None:
    before = taken(model, tmp_path)
    if value is None:
        model.bias.grad = None
    else:
        model.bias.grad.fill_(value)
    found = judged(before, taken(model, tmp_path))
    assert (found.state, list(found.names)) == (DIFFERENT, ["bias"])


def test_infinities_of_both_are_the_same_and_do_not_hide_what_else_differs(
    model: nn.Linear, tmp_path: Path
) -> None:
    model.weight.grad[0, 0] = float("inf")
    before = taken(model, tmp_path)
    model.weight.grad[1, 1].mul_(1 + 2**-22)
    found = judged(before, taken(model, tmp_path))
    assert (found.state, found.is_wrong) == (ROUNDING, False)
    model.bias.grad.mul_(1.01)
    assert judged(before, taken(model, tmp_path)).names == ["bias"]
    model.weight.grad[0, 1] = float("inf")
    assert judged(before, taken(model, tmp_path)).names == ["weight", "bias"]


def test_a_script_that_is_not_deterministic_is_told_by_stock_beside_itself(
    model: nn.Linear, tmp_path: Path
) -> None:
    captures = []
    for factor in (1.0, 1.001, 1.001):
        model.weight.grad.mul_(factor)
        captures.append(taken(model, tmp_path))
    first, second, other = captures
    found = judged(first, other, second=second)
    assert found.of_stock == pytest.approx(0.001, rel=1e-3)
    assert found.state == ROUNDING


def test_ranks_that_differ_are_wrong_unless_stocks_do_too(model: nn.Linear, tmp_path: Path) -> None:
    alike, apart = taken(model, tmp_path), taken(model, tmp_path, others=("something else",))
    assert judged(alike, apart).is_wrong
    assert judged(alike, apart).shared == (True, False)
    assert not judged(apart, apart).is_wrong


def test_a_gradient_of_nothing_but_rounding_is_not_wrong(model: nn.Linear, tmp_path: Path) -> None:
    """That of a bias before a normalization: relative to itself all of it is different."""
    model.bias.grad.fill_(1e-9)
    before = taken(model, tmp_path)
    model.bias.grad.fill_(-1e-9)
    assert judged(before, taken(model, tmp_path)).state == ROUNDING


def test_of_a_large_model_a_part_is_written(
    model: nn.Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tritonddp.cli.comparison.values._BYTES", 84)
    found = taken(model, tmp_path)
    values = torch.load(found[0]["path"])
    assert sum(value.numel() for value in values.values()) == 19 + 1
    # 11 elements apart: no column of 20 is left out.
    assert torch.equal(values["weight"], model.weight.grad.flatten()[::11])
