"""tritonddp's class under torch's names, and attributes that libraries set on torch's class."""

import re
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import launched
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import unwarned

import tritonddp
from tritonddp._torch import STOCK
from tritonddp.compat.stock_ddp import StockDDPNames
from tritonddp.integrations import replacement
from tritonddp.integrations.accelerate import instead_of_stock

OURS = tritonddp.DistributedDataParallel
PLACES: list[Any] = [torch.nn.parallel, torch.nn.parallel.distributed]
HOOK = '{"worker_process_setup_hook": "tritonddp.replace_stock"}'


@pytest.fixture(autouse=True)
def stock_comes_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(replacement, "_is_for_good", False)
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", STOCK)
    yield
    torch.nn.parallel.distributed.__class__ = types.ModuleType
    vars(torch.nn.parallel.distributed).pop(replacement._OFFERED, None)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that has imported torch's class by name."""
    trainer: Any = types.ModuleType("trainer_of_a_user")
    trainer.Wrapper = STOCK
    monkeypatch.setitem(sys.modules, trainer.__name__, trainer)
    return trainer.__name__


@pytest.fixture
def wrap() -> Any:
    """Wraps a module with the class that torch's name refers to."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield lambda: torch.nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    dist.destroy_process_group()


def offered() -> list[Any]:
    return [place.DistributedDataParallel for place in PLACES]


def test_every_name_of_the_class_is_replaced_for_good() -> None:
    """No warning: no module of the process has imported it by name."""
    program = """
import torch, tritonddp
tritonddp.replace_stock()
tritonddp.replace_stock()
from torch.nn.parallel import DistributedDataParallel as first
from torch.nn.parallel.distributed import DistributedDataParallel as second
print({first, second, torch.nn.parallel.DistributedDataParallel})
"""
    done = launched.run("-W", "error::UserWarning", "-c", program, nproc=None)
    assert done.stdout == "{<class 'tritonddp.wrapper.DistributedDataParallel'>}\n", done.stderr


def test_modules_that_keep_the_class_are_named_once_when_it_is_replaced(bound, monkeypatch):
    """In a worker of Ray, where the warning names the hook of workers."""
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    text = rf"by name earlier, and keep it: .*{bound}.* If they wrap.*{re.escape(HOOK)}"
    with pytest.warns(UserWarning, match=text):
        tritonddp.replace_stock()
    with unwarned():
        tritonddp.replace_stock()


def test_a_context_warns_only_if_nothing_was_wrapped_in_it(bound: str, wrap: Any) -> None:
    text = rf"Nothing was wrapped .* keep it: .*{bound}.* Enter"
    with pytest.warns(UserWarning, match=text), tritonddp.instead_of_stock():
        assert offered() == [OURS, OURS]
    assert offered() == [STOCK, STOCK]
    with unwarned(), instead_of_stock():  # its former name
        assert type(wrap()) is OURS
    assert type(wrap()) is STOCK


def train(ddp: nn.Module) -> None:
    with ddp.join():  # type: ignore[operator]
        for _ in range(2):  # stock cannot reduce over the fake backend
            ddp(torch.ones(1, 1))


def test_a_wrapper_that_is_still_torchs_works(wrap: Any) -> None:
    """Its methods look up torch's class by its name."""
    stock = wrap()
    with replacement.stock_replaced():
        late = STOCK(nn.Linear(1, 1))
        assert offered() == [OURS, OURS]
        for ddp in (stock, late, wrap()):
            train(ddp)
        with stock._inside_ddp_forward():
            assert STOCK._get_active_ddp_module() is stock
    train(stock)


@pytest.mark.filterwarnings("ignore:These modules imported:UserWarning")
def test_libraries_may_subclass_the_class_and_set_the_name() -> None:
    with replacement.stock_replaced():
        tritonddp.replace_stock()
    assert offered() == [OURS, OURS]  # for good, also after the context
    from torch.nn.parallel import DistributedDataParallel

    assert OURS in type("Mine", (DistributedDataParallel,), {}).__mro__
    for place in PLACES:
        place.DistributedDataParallel = STOCK
    assert offered() == [STOCK, STOCK]
    tritonddp.replace_stock()
    assert offered() == [OURS, OURS]
    with mock.patch("torch.nn.parallel.distributed.DistributedDataParallel", int):
        assert offered() == [OURS, int]
    assert vars(torch.nn.parallel.distributed)["DistributedDataParallel"] is STOCK


@pytest.mark.filterwarnings("ignore:These modules imported:UserWarning")
def test_attributes_that_libraries_set_on_the_class_of_torch_are_on_ours(monkeypatch, wrap):
    tritonddp.replace_stock()
    assert not hasattr(wrap(), "reset")
    attributes = {
        "reset": lambda self: self.module.in_features,
        "kind": property(lambda self: type(self.module).__name__),
        "twice": staticmethod(lambda x: 2 * x),
        "made_by": classmethod(lambda cls: cls),
        "version": 3,
    }
    for name, value in attributes.items():
        monkeypatch.setattr(STOCK, name, value, raising=False)
        monkeypatch.setattr(StockDDPNames, name, None, raising=False)  # restored at the end
        delattr(StockDDPNames, name)
    ddp = wrap()
    found = (ddp.reset(), ddp.kind, ddp.twice(4), ddp.made_by(), ddp.version)
    assert found == (1, "Linear", 8, OURS, 3)
