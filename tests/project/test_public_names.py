"""The public API: the names of stock DDP and those in docs/api.md."""

import re
from typing import Any

from distributed import ranks
from launched import ROOT
from modules import normed
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock
from training import drawn, train_step

import tritonddp
from tritonddp import DistributedDataParallel

WRAPPER = "tritonddp.DistributedDataParallel"
# Names that stock's wrapper does not have.
ADDED = {
    *("add_scalars", "check_sync", "comm_state_dict", "load_comm_state_dict", "metrics"),
    *("reduce_gradients", "reduced_scalars", "request_stop", "should_stop", "weighted"),
}
# Attributes and members that stock DDP has since torch 2.11, 2.13 and 2.15.
LATER_ATTRIBUTES = {
    *("bucket_bytes_cap_list", "batched_grad_copy", "forward_sync_buffers"),
    "lazy_bucket_allocation",
}
LATER = {
    *("finalize_backward", "require_manual_backward_finalization"),
    "should_finalize_after_backward",
}
# Private attributes of an instance. Stock's join hook sets the last two.
PRIVATE = {"_ddp_state", "_authoritative_rank", "_divide_by_initial_world_size"}

API = (ROOT / "docs" / "api.md").read_text()
DOCUMENTED = {  # classes, their members, functions
    each
    for name, members in re.findall(r"^::: (\S+)\n((?: .*\n)*)", API, re.MULTILINE)
    for each in (name, *(f"{name}.{member}" for member in re.findall(r"- (\w+)$", members, re.M)))
}


def test_the_reference_has_every_public_name() -> None:
    public = {f"tritonddp.{name}" for name in tritonddp.__all__ if name != "__version__"}
    assert public <= DOCUMENTED
    members = {name.removeprefix(f"{WRAPPER}.") for name in DOCUMENTED if f"{WRAPPER}." in name}
    own = {name for name in vars(DistributedDataParallel) if not name.startswith("_")}
    assert members == own | {"join", "join_hook"}  # in the base, with stock's other names
    assert members >= ADDED | LATER


@ranks(1)
def test_a_wrapper_has_the_names_of_stock_and_documented_ones() -> None:
    ours, stock = (kind(nn.Linear(2, 2)) for kind in (DistributedDataParallel, Stock))
    later = LATER | LATER_ATTRIBUTES
    more = set(dir(ours)) - set(dir(stock))
    assert {name for name in more if not name.startswith("_")} - later == ADDED
    assert set(vars(ours)) - set(dir(stock)) <= PRIVATE | later
    missing = set(dir(stock)) - set(dir(ours))
    assert not [name for name in missing if not name.startswith("_")]


class Forwarding(DistributedDataParallel):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


@ranks(1)
def test_a_subclass_that_forwards_attributes_finds_those_of_the_module() -> None:
    """The package uses these names for its own objects."""
    names = "config group sync core caps buffer_sync state_broadcast check_finite window"
    module = normed()
    for name in names.split():
        setattr(module, name, object())
    ddp = Forwarding(module)
    train_step(ddp, drawn(5, 3))
    for name in names.split():
        assert getattr(ddp, name) is getattr(module, name), name
