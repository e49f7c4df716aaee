"""tritonddp's class under torch's names, and what others put on torch's class."""

import contextlib
import re
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import launched
import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

import tritonddp
from tritonddp._torch import STOCK, patches_of_stock
from tritonddp.compat.stock_ddp import StockDDPNames
from tritonddp.integrations import replacement
from tritonddp.integrations.accelerate import instead_of_stock

OURS = tritonddp.DistributedDataParallel
PLACES = [torch.nn.parallel, torch.nn.parallel.distributed]


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
    assert done.stdout == "{<class 'tritonddp.wrapper.DistributedDataParallel'>}\n", done.stderr


def test_whoever_had_bound_the_class_before_is_named_when_it_is_replaced(bound: str) -> None:
    with pytest.warns(UserWarning, match=rf"by name before, and keep it: .*{bound}.* If they wrap"):
        tritonddp.replace_stock()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tritonddp.replace_stock()  # said once


def test_in_a_worker_of_ray_the_warning_says_how_to_be_earlier(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with pytest.warns(UserWarning, match=rf"{bound}.*tritonddp\.integrations\.$"):
        tritonddp.replace_stock()
    monkeypatch.setattr(replacement, "_is_for_good", False)
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", STOCK)
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    said = r'{"worker_process_setup_hook": "tritonddp.replace_stock"}'
    with pytest.warns(UserWarning, match=re.escape(said)):
        tritonddp.replace_stock()


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


def test_a_subclass_of_the_replaced_name_is_a_subclass_of_ours() -> None:
    tritonddp.replace_stock()
    from torch.nn.parallel import DistributedDataParallel as DDP

    class Mine(DDP):
        pass

    assert OURS in Mine.__mro__


def train(ddp: nn.Module) -> None:
    with ddp.join():  # type: ignore[operator]
        for _ in range(2):  # (stock cannot reduce over the fake backend)
            ddp(torch.ones(1, 1))


@pytest.mark.parametrize("for_good", [True, False])
def test_a_wrapper_that_is_still_torchs_works_as_ever(for_good: bool, wrap: Any) -> None:
    """Its methods look torch's class up by its name too."""
    stock = wrap()
    with contextlib.nullcontext() if for_good else replacement.stock_replaced():
        if for_good:
            tritonddp.replace_stock()
        late = STOCK(nn.Linear(1, 1))
        assert names() == [OURS, OURS]
        for ddp in (stock, late, wrap()):
            train(ddp)
        with stock._inside_ddp_forward():
            assert STOCK._get_active_ddp_module() is stock
    train(stock)


def test_a_context_inside_which_it_is_replaced_for_good_leaves_it_so() -> None:
    with replacement.stock_replaced():
        tritonddp.replace_stock()
    assert names() == [OURS, OURS]


def trained_with_zero() -> tuple[nn.Module, list[Tensor]]:
    """With torch's own classes, by their names; the wrapper, and its parameters at the end."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))
    ddp = torch.nn.parallel.DistributedDataParallel(layers)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.1)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        ddp(torch.randn(5, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    assert 0 < len(optimizer.optim.state) < 6
    return ddp, list(ddp.parameters())


@ranks(2)
def test_torchs_zero_redundancy_optimizer_stays_torchs_and_finds_all_gradients() -> None:
    with instead_of_stock():
        ours, params = trained_with_zero()
    stock, expected = trained_with_zero()
    assert (type(ours), type(stock)) == (OURS, STOCK)
    assert ZeroRedundancyOptimizer.__module__.startswith("torch.")
    for param, other in zip(params, expected, strict=True):
        assert_same_bits(param, other)
        assert_same_bits(param.grad, other.grad)  # there on all ranks


def test_somebody_else_may_set_the_name_again() -> None:
    tritonddp.replace_stock()
    for place in PLACES:
        place.DistributedDataParallel = STOCK  # type: ignore[attr-defined]
    assert names() == [STOCK, STOCK]
    tritonddp.replace_stock()
    assert names() == [OURS, OURS]
    with mock.patch("torch.nn.parallel.distributed.DistributedDataParallel", int):
        assert names() == [OURS, int]
    assert vars(torch.nn.parallel.distributed)["DistributedDataParallel"] is STOCK


# What others put on torch's class

pytestmark = pytest.mark.filterwarnings("ignore:These modules had imported:UserWarning")


def test_what_somebody_has_put_on_torchs_class_is_found_on_ours(
    monkeypatch: pytest.MonkeyPatch, wrap: Any
) -> None:
    tritonddp.replace_stock()
    assert not hasattr(wrap(), "reset")
    put = {
        "reset": lambda self: self.module.in_features,
        "kind": property(lambda self: type(self.module).__name__),
        "twice": staticmethod(lambda x: 2 * x),
        "made_by": classmethod(lambda cls: cls),
        "version": 3,
    }
    for name, value in put.items():
        monkeypatch.setattr(STOCK, name, value, raising=False)
        monkeypatch.setattr(StockDDPNames, name, None, raising=False)  # taken back in the end
        delattr(StockDDPNames, name)
    ddp = wrap()
    assert (ddp.reset(), ddp.kind, ddp.twice(4), ddp.made_by(), ddp.version) == (
        (1, "Linear", 8, OURS, 3)
    )


def test_what_is_torchs_own_is_not_taken_for_somebody_elses(wrap: Any) -> None:
    assert patches_of_stock() == {}
    tritonddp.replace_stock()
    with pytest.raises(AttributeError, match="no attribute '_passing_sync_batchnorm_handle'"):
        _ = wrap()._passing_sync_batchnorm_handle


def test_what_an_installed_fabric_lacks_itself_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "lightning_fabric" / "strategies"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("import packaging_of_lightning")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("lightning_fabric")]:
        monkeypatch.delitem(sys.modules, name)
    from tritonddp.integrations.strategies import lightning_class

    with pytest.raises(ModuleNotFoundError, match="packaging_of_lightning"):
        lightning_class("user", "strategies.DDPStrategy", "lightning_fabric")
