"""The tensors of an output are found in containers of any type."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from gc import get_referents
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

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
