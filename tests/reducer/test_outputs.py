"""The tensors of an output are found in whatever holds them."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tritonddp.reducer.graph.backward import tensors_in

Pair = namedtuple("Pair", "first second")
ONE, TWO, THREE = (torch.tensor(float(number)) for number in range(3))


@dataclass
class Result:
    loss: Any = None
    unset: Any = field(init=False)


class Plain:
    """Nobody knows what it holds."""


class Lazy(UserDict):
    """Its values cannot be had yet, as those of a configuration with placeholders."""

    def values(self) -> Any:
        raise KeyError("not computed")


class Guarded(list):
    def __iter__(self) -> Any:
        raise RuntimeError("iterated")


def found(output: Any) -> set[Tensor]:
    return set(tensors_in(output))


def test_containers_of_many_types_beside_each_other() -> None:
    param = nn.Parameter(torch.ones(2))
    output = {
        "a": [ONE, 1, "x", None, Pair(TWO, (THREE,))],
        "b": OrderedDict(c=UserDict(d=param)),
        "e": [Plain(), torch.float32, Result, {ONE}],
    }
    assert found(output) == {ONE, TWO, THREE, param}
    assert tensors_in(param) == [param]
    assert not tensors_in(None)
    assert not tensors_in([[], {}, ()])


def test_containers_whose_code_raises() -> None:
    assert found([Lazy(a=ONE), Guarded([TWO]), {"b": THREE}]) == {TWO, THREE}


def test_what_is_shared_on_each_level_is_looked_at_once() -> None:
    nested: Any = [ONE]
    for _ in range(200):
        nested = [nested, nested]
    assert found(nested) == {ONE}
    assert len(tensors_in(nested)) <= 2
