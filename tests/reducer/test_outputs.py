"""The tensors of an output are found in containers of any type."""

import copy
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from gc import get_referents
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import assert_mean_of, drawn, wrap

from tritonddp.reducer.graph import backward
from tritonddp.reducer.graph.backward import tensors_in

Pair = namedtuple("Pair", "first second")
ONE, TWO, THREE = (torch.tensor(float(number)) for number in range(3))


@dataclass
class Result:
    loss: Any = None
    unset: Any = field(init=False)


class Plain:
    """Its content is unknown."""


class Lazy(UserDict):
    """Computes its values on demand."""

    def values(self) -> Any:
        raise AssertionError("computed")


class Guarded(list):
    def __iter__(self) -> Any:
        raise AssertionError("iterated")


@dataclass
class Computed:
    given: Any

    def __getattribute__(self, name: str) -> Any:
        if name == "given":
            raise AssertionError("computed")
        return super().__getattribute__(name)


def found(output: Any) -> set[Tensor]:
    return set(tensors_in(output))


def test_containers_of_many_types() -> None:
    param = nn.Parameter(torch.ones(2))
    output = {
        "a": [ONE, 1, "x", None, Pair(TWO, (THREE,))],
        "b": OrderedDict(c=Result(param)),
        "e": [Plain(), torch.float32, Result, {ONE}],
    }
    assert found(output) == {ONE, TWO, THREE, param}
    assert tensors_in(param) == [param]
    assert not tensors_in(None)
    assert not tensors_in([[], {}, ()])


def test_no_code_of_a_container_runs() -> None:
    assert found([Lazy(a=ONE), Guarded([TWO]), {"b": THREE}]) == {TWO, THREE}
    assert found(Computed(ONE)) == {ONE}


def test_shared_containers_are_searched_once() -> None:
    nested: Any = [ONE]
    for _ in range(200):
        nested = [nested, nested]
    assert found(nested) == {ONE}
    assert len(tensors_in(nested)) <= 2


def test_the_elements_of_long_lists_of_numbers_are_not_looked_at() -> None:
    numbers = [*range(300_000)]
    looked_at = mock.patch.object(backward, "get_referents", side_effect=get_referents)
    with looked_at as looks:
        assert found({"loss": ONE, "ids": numbers, "more": dict.fromkeys(numbers, 1)}) == {ONE}
    assert max(len(each) for call in looks.call_args_list for each in call.args) < 10


class Hidden(nn.Module):
    """A layer in one or two reentrant checkpoints, whose output hides its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(4, 4), 1

    def forward(self, x: Tensor) -> Any:
        outputs = [
            checkpoint(self.layer, x * n, use_reentrant=True) for n in range(1, self.times + 1)
        ]
        return SimpleNamespace(get=lambda: torch.stack(outputs).sum(0))


@ranks(2)
def test_a_layer_in_two_checkpoints_of_a_hidden_forward_is_an_error() -> None:
    """As in stock DDP, where a parameter is marked ready twice."""
    net = Hidden()
    alone = copy.deepcopy(net)
    ddp = wrap(net)
    for step in range(3):
        for each in ddp, alone:
            each.zero_grad()
            each(drawn(3, 4, step=step).requires_grad_()).get().square().sum().backward()
        assert_mean_of(ddp, alone, f"step {step}")
    net.times = 2
    with pytest.raises(RuntimeError, match="became ready again after all gradients were averaged"):
        ddp(drawn(3, 4).requires_grad_()).get().square().sum().backward()
