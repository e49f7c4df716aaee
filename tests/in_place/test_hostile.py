"""Programs that know nothing of ``replicate``, and that a module in place has to be right for."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed import assert_same_on_all_ranks, ranks
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from training import drawn, gradients, train_step

from tritonddp import replicate
from tritonddp.replicate import ReplicatedModule


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


# Copies that a class makes itself


class CopiesItsDictionary(Net):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


class CopiesItsAttributes(Net):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        nn.Module.__init__(made)
        for name, value in self.__dict__.items():
            setattr(made, name, copy.deepcopy(value, memo))
        return made


class NestsItsState(Net):
    def __getstate__(self) -> dict[str, Any]:
        return {"attributes": self.__dict__.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["attributes"])


OWN_COPIES: dict[str, Callable[[], nn.Module]] = {
    "dictionary": CopiesItsDictionary,
    "attributes": CopiesItsAttributes,
    "nested state": NestsItsState,
    "parametrized": lambda: weight_norm(Net().layer),
    "graph module": lambda: torch.fx.symbolic_trace(Net()),
}


@pytest.mark.parametrize("kind", OWN_COPIES)
@ranks(2)
def test_a_copy_by_the_class_itself_is_a_plain_module(kind: str, rank: int) -> None:
    net = replicate(OWN_COPIES[kind]())
    train_step(net, drawn(5, 4))
    copies = [copy.deepcopy(net)]
    if kind != "parametrized":  # which torch refuses to pickle
        copies.append(pickle.loads(pickle.dumps(net)))
    for made in copies:
        assert not isinstance(made, ReplicatedModule)
        assert list(made.state_dict()) == list(net.state_dict())
        if rank == 0:  # one rank alone trains it
            train_step(made, drawn(5, 4))
    train_step(net, drawn(5, 4, step=1))
    assert_same_on_all_ranks(gradients(net))
    train_step(replicate(copies[-1]), drawn(5, 4, step=2))
    assert_same_on_all_ranks(gradients(copies[-1]))


@ranks(2)
def test_a_graph_module_may_be_compiled_again(rank: int) -> None:
    net = replicate(torch.fx.symbolic_trace(Net()))
    train_step(net, drawn(5, 4))
    net.graph.lint()
    net.recompile()
    train_step(net, drawn(5, 4, step=1))
    assert_same_on_all_ranks(gradients(net))
