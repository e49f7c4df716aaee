"""The public API: the names of stock DDP and those in docs/api.md, whose examples run."""

import importlib
import inspect
import os
import pkgutil
import re
from operator import attrgetter
from typing import Any

from distributed import gather, ranks
from launched import ROOT
from modules import normed
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock
from training import drawn, in_folder, train_step

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

# The reference

API = (ROOT / "docs" / "api.md").read_text()
(BEGINNING,) = re.findall(
    r"<!-- names of the examples -->\n```python\n(.*?)```", API, flags=re.DOTALL
)
DOCUMENTED = {  # classes, their members, functions
    each
    for name, members in re.findall(r"^::: (\S+)\n((?: .*\n)*)", API, re.MULTILINE)
    for each in (name, *(f"{name}.{member}" for member in re.findall(r"- (\w+)$", members, re.M)))
}
# tests/integrations tests these: they change the whole process, or need a library and a launcher.
LAUNCHED = ("tritonddp.replace_stock", "tritonddp.integrations.")
NAMES = sorted(name for name in DOCUMENTED if not name.startswith(LAUNCHED))


def examples(name: str) -> list[str]:
    """The examples in the docstring of the object with this name."""
    first, _, rest = name.partition(".")
    try:  # an attribute of the package may have the name of a module, too
        obj: Any = attrgetter(rest)(importlib.import_module(first))
    except AttributeError:
        obj = pkgutil.resolve_name(name)
    text = inspect.cleandoc(obj.__doc__ or "")
    blocks = re.findall(r"^Example::\n\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    return [inspect.cleandoc(f"\n{block}") for block in blocks]


def test_the_reference_has_every_public_name() -> None:
    public = {f"tritonddp.{name}" for name in tritonddp.__all__ if name != "__version__"}
    assert public <= DOCUMENTED
    members = {name.removeprefix(f"{WRAPPER}.") for name in DOCUMENTED if f"{WRAPPER}." in name}
    own = {name for name in vars(DistributedDataParallel) if not name.startswith("_")}
    assert members == own | {"join", "join_hook"}  # in the base, with stock's other names
    assert members >= ADDED | LATER


@ranks(2)
def test_examples_run_on_two_ranks() -> None:
    codes = {(name, code) for name in NAMES for code in examples(name)}
    assert len(codes) > 12
    with in_folder():
        os.chdir(gather(os.getcwd())[0])  # all ranks read the files that an example writes
        for name, code in sorted(codes):
            known: dict[str, Any] = {"__name__": "__main__"}
            exec(compile(BEGINNING, "docs/api.md", "exec"), known)
            exec(compile(code, f"the example of {name}", "exec"), known)
            assert isinstance(known["model"], DistributedDataParallel)
            known["model"].check_sync()


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
