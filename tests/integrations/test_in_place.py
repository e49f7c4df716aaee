"""Adapters replicate a model in place where they are told to."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import launched
import pytest
import torch
import torch.distributed as dist
from launched import ROOT
from test_frameworks import Accelerator, is_installed
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import tritonddp
from tritonddp.integrations.accelerate import use_tritonddp
from tritonddp.integrations.in_place import replicated

NEEDED = {
    "accelerate": ("accelerate",),
    "fabric": ("lightning", "lightning_fabric"),
    "lightning": ("lightning", "pytorch_lightning"),
}


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process is one of two that only seem to exchange something."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.parametrize("library", NEEDED)
def test_a_library_trains_a_replicated_module_and_all_calls_of_it_are_reduced(library: str) -> None:
    if not is_installed(*NEEDED[library]):
        pytest.skip(f"needs {library}: the extra [integrations]")
    done = launched.run(
        ROOT / "tests" / "integrations" / "in_place.py",
        library,
        env={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-6000:]


class Wrapping(Accelerator):
    """Wraps, registers a hook and marks the model as Accelerate's does."""

    def __init__(self, handler: Any = None) -> None:
        super().__init__()
        self.ddp_handler = handler
        self.asked: list[Any] = []

    def prepare_model(self, model: Any, *, fail: bool = False) -> Any:
        if getattr(model, "_is_accelerate_prepared", False):
            return model
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
        if self.ddp_handler is not None:
            self.ddp_handler.register_comm_hook(model)
        model._is_accelerate_prepared = True
        return model

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: Any = None) -> Iterator[None]:
        self.asked += joinables
        yield

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: Any) -> Iterator[None]:
        assert isinstance(model, tritonddp.DistributedDataParallel)
        yield


class Handler:
    def register_comm_hook(self, model: Any) -> None:
        model.register_comm_hook(None, lambda state, bucket: bucket)


@pytest.mark.usefixtures("two_ranks")
def test_an_accelerator_gives_back_the_module_itself() -> None:
    handler, stock = Handler(), torch.nn.parallel.DistributedDataParallel
    accelerator = use_tritonddp(Wrapping(handler), in_place=True, metrics=True)
    model = nn.Linear(2, 2)
    assert accelerator.prepare_model(model) is model
    wrapper = tritonddp.ddp(model)
    assert len(wrapper._comm_hooks) == 1
    assert accelerator.ddp_handler is handler
    assert torch.nn.parallel.DistributedDataParallel is stock
    assert wrapper.metrics()["step"] == 0
    with accelerator.join_uneven_inputs([model]):
        assert accelerator.asked == [wrapper]
    with accelerator.trigger_sync_in_backward(model):
        pass


@pytest.mark.usefixtures("two_ranks")
def test_a_copy_of_a_prepared_module_is_not_taken_for_prepared() -> None:

    accelerator = use_tritonddp(Wrapping(), in_place=True)
    model = accelerator.prepare_model(nn.Linear(2, 2))
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(made) is nn.Linear
        made._is_accelerate_prepared = True  # what prepare() says of all that it gives back
        assert accelerator.prepare_model(made) is made
        assert tritonddp.ddp(made) is not tritonddp.ddp(model)
    wrapper = tritonddp.ddp(model)
    assert accelerator.prepare_model(model) is model
    assert tritonddp.ddp(model) is wrapper


def test_in_place_is_on_or_off() -> None:
    with pytest.raises(TypeError, match="in_place should be True or False, got 'yes'"):
        use_tritonddp(Accelerator(), in_place="yes")  # type: ignore[arg-type]


@pytest.mark.long  # to import Lightning takes longer than all the others
@pytest.mark.parametrize("library", ["lightning", "fabric"])
def test_a_strategy_in_place_is_on_or_off(library: str) -> None:
    if not is_installed(*NEEDED[library]):
        pytest.skip(f"needs {library}: the extra [integrations]")
    strategies = pytest.importorskip(f"tritonddp.integrations.{library}")
    with pytest.raises(TypeError, match="in_place should be True or False, got 'yes'"):
        strategies.TritonDDPStrategy(in_place="yes")


@pytest.mark.usefixtures("two_ranks")
def test_a_second_training_finds_the_module_replicated() -> None:
    module = nn.Linear(2, 2)
    wrapper = replicated(module, None, {"bucket_cap_mb": 1})
    assert replicated(module, None, {"bucket_cap_mb": 1}) is wrapper
    assert replicated(module, None, {}) is wrapper
    with pytest.raises(ValueError, match=r"this Linear is replicated already, and not .* bucket"):
        replicated(module, None, {"bucket_cap_mb": 2})
