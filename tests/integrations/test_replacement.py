"""tritonddp's class under torch's names, and what others put on torch's class."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from typing import Any

import launched
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import tritonddp
from tritonddp._compat import STOCK, put_on_stock
from tritonddp.integrations.accelerate import instead_of_stock

OURS = tritonddp.DistributedDataParallel
PLACES = [torch.nn.parallel, torch.nn.parallel.distributed]


@pytest.fixture(autouse=True)
def stock_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in PLACES:
        monkeypatch.setattr(place, "DistributedDataParallel", STOCK)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that has imported torch's class by name."""
    trainer = types.ModuleType("trainer_of_somebody")
    trainer.Wrapper = STOCK  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, trainer.__name__, trainer)
    return trainer.__name__


@pytest.fixture
def wrap() -> Any:
    """Wraps a module with the class that torch offers."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield lambda: torch.nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    dist.destroy_process_group()


def names() -> list[Any]:
    return [place.DistributedDataParallel for place in PLACES]  # type: ignore[attr-defined]


def test_every_name_by_which_torch_offers_its_class_is_replaced_for_good() -> None:
    """In a process in which nobody has imported it by name: without a warning."""
    program = """
import torch, tritonddp
tritonddp.replace_stock()
tritonddp.replace_stock()
from torch.nn.parallel import DistributedDataParallel as first
from torch.nn.parallel.distributed import DistributedDataParallel as second
print({first, second, torch.nn.parallel.DistributedDataParallel})
"""
    done = launched.run("-W", "error::UserWarning", "-c", program, nproc=None)
    assert done.stdout == "{<class 'tritonddp.ddp.DistributedDataParallel'>}\n", done.stderr


def test_torch_offers_its_class_by_no_other_name() -> None:
    """Of torch's other modules that know it, none wraps: they ask what a module is."""
    public = [
        name
        for name, module in list(sys.modules.items())
        if name.startswith("torch.nn") and any(value is STOCK for value in vars(module).values())
    ]
    assert sorted(public) == ["torch.nn.parallel", "torch.nn.parallel.distributed"]


def test_whoever_had_bound_the_class_before_is_named_when_it_is_replaced(bound: str) -> None:
    with pytest.warns(UserWarning, match=rf"by name before, and keep it: .*{bound}.* If they wrap"):
        tritonddp.replace_stock()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tritonddp.replace_stock()  # said once


def test_a_context_in_which_nothing_was_wrapped_names_who_had_bound_the_class(bound: str) -> None:
    said = rf"Nothing was wrapped .* keep it: .*{bound}.* Enter"
    with pytest.warns(UserWarning, match=said), tritonddp.instead_of_stock():
        assert names() == [OURS, OURS]
    assert names() == [STOCK, STOCK]


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_context_in_which_something_was_wrapped_says_nothing(bound: str, wrap: Any) -> None:
    with instead_of_stock():  # the former path
        assert type(wrap()) is OURS  # and is gone already
    assert type(wrap()) is STOCK


def test_an_exception_inside_the_context_is_not_hidden_by_a_warning() -> None:
    with pytest.raises(ZeroDivisionError), tritonddp.instead_of_stock():
        raise ZeroDivisionError
    assert names() == [STOCK, STOCK]


def test_a_subclass_of_the_replaced_name_is_a_subclass_of_ours() -> None:
    tritonddp.replace_stock()
    from torch.nn.parallel import DistributedDataParallel as DDP

    class Mine(DDP):
        pass

    assert OURS in Mine.__mro__


# What others put on torch's class

pytestmark = pytest.mark.filterwarnings("ignore:These modules had imported:UserWarning")


def test_what_somebody_has_put_on_torchs_class_is_found_on_ours(
    monkeypatch: pytest.MonkeyPatch, wrap: Any
) -> None:
    tritonddp.replace_stock()
    ddp = wrap()
    assert not hasattr(ddp, "reset")
    put = {
        "reset": lambda self: self.module.in_features,
        "kind": property(lambda self: type(self.module).__name__),
        "twice": staticmethod(lambda x: 2 * x),
        "made_by": classmethod(lambda cls: cls),
        "version": 3,
    }
    for name, value in put.items():
        monkeypatch.setattr(STOCK, name, value, raising=False)
    assert (ddp.reset(), ddp.kind, ddp.twice(4), ddp.made_by(), ddp.version) == (
        (1, "Linear", 8, OURS, 3)
    )


def test_what_is_torchs_own_is_not_taken_for_somebody_elses(wrap: Any) -> None:
    own = {name for name, value in vars(STOCK).items() if put_on_stock(name) is None}
    assert own == set(vars(STOCK))
    tritonddp.replace_stock()
    with pytest.raises(AttributeError, match="no attribute '_passing_sync_batchnorm_handle'"):
        _ = wrap()._passing_sync_batchnorm_handle


def test_a_missing_fabric_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.fabric", "lightning_fabric"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "tritonddp.integrations.fabric", raising=False)
    with pytest.raises(ImportError, match=r"pip install lightning \(or lightning-fabric\)"):
        importlib.import_module("tritonddp.integrations.fabric")
