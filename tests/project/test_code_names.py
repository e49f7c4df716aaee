"""Names of code that a page has in backticks, ``name()`` and ``owner.attribute``, exist."""

import builtins
import importlib
import inspect
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launched import ROOT
from torch import nn
from torch.distributed.algorithms import join

import tritonddp
from tritonddp import DistributedDataParallel

PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "tests/differential/named/README.md")
    ),
]
# How pages call objects of the user and of the package, and abbreviate modules.
OBJECTS: dict[str, Any] = {
    "model": DistributedDataParallel,
    "ddp": DistributedDataParallel,
    "module": nn.Module,
    "optimizer": torch.optim.Optimizer,
    "scaler": torch.amp.GradScaler,
    "grad_fn": torch.autograd.graph.Node,
    "nn": nn,
    "dist": dist,
    "autograd": torch.autograd,
}
CLASSES = {"bucket": ("Bucket",), "reducer": ("AutogradDriver", "StockReducer")}
# Of other libraries, and of a program that a page shows.
OTHERS = re.findall(
    r"[\w.]+",
    """DDP DistributedDataParallelKwargs Fabric Trainer backward dcp.async_save distrib_ctx
    get_gradients idist.auto_model launch main make_private prepare prepare_model
    ray.train.torch.prepare_model reduce_parameters state_dict tr train""",
)
FILE = re.compile(r"\.(py|md|toml|cff|yml|txt|json)$")
NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\(.*\))?")
# Modules whose import needs other libraries, or starts a program.
NOT_IMPORTED = r"tritonddp\.(integrations\.(fabric|lightning|transformers)|__main__|cli\.injected)"


def named(page: Path) -> Iterator[str]:
    """``owner.attribute`` or ``name``, which is called, of the inline code of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", text):
        found = NAME.fullmatch(code)
        if found and (found[2] or "." in found[1]) and not FILE.search(code):
            yield found[1]


@cache
def modules() -> dict[str, list[ModuleType]]:
    """The modules of the package by their names without the folder."""
    found = defaultdict(list)
    for each in pkgutil.walk_packages(tritonddp.__path__, "tritonddp."):
        if not re.match(NOT_IMPORTED, each.name):
            module = importlib.import_module(each.name)
            found[each.name.rpartition(".")[2]].append(module)
    return found


@cache
def classes() -> dict[str, type]:
    """The classes of the package, by name."""
    members = [vars(module).values() for of in modules().values() for module in of]
    every = [each for of in members for each in of if inspect.isclass(each)]
    return {each.__name__: each for each in every if each.__module__.startswith("tritonddp")}


@cache
def defined() -> set[str]:
    """Functions, methods and classes of the package, and strings such as names of loggers."""
    text = "".join(path.read_text() for path in (ROOT / "tritonddp").rglob("*.py"))
    return {*re.findall(r"\b(?:def|class) (\w+)", text), *re.findall(r'"([\w.]+)"', text)}


def has(kind: type, attribute: str) -> bool:
    """Class attributes, annotations and what methods set."""
    own = [each for each in kind.__mro__ if each.__module__.startswith("tritonddp")]
    pattern = rf"^    {attribute}: |\bself\.{attribute}\b[^=\n]*= "
    sources = map(inspect.getsource, own)
    return hasattr(kind, attribute) or any(re.search(pattern, s, re.MULTILINE) for s in sources)


def exists(name: str) -> bool:
    first, *rest = name.split(".")
    if name in OTHERS or name in defined():
        return True
    if not rest:
        places = (DistributedDataParallel, torch.Tensor, dist, join, builtins)
        return any(hasattr(each, name) for each in places)
    if first in CLASSES:
        return any(has(classes()[each], rest[0]) for each in CLASSES[first])
    if first in classes():
        return has(classes()[first], rest[0])
    if first in OBJECTS:
        is_module = rest[0] == "module" and OBJECTS[first] is DistributedDataParallel
        return is_module or hasattr(OBJECTS[first], rest[0])
    is_in_module = any(hasattr(module, rest[0]) for module in modules().get(first, ()))
    return is_in_module or is_importable(name)


def is_importable(name: str) -> bool:
    """Without an import of the modules of the package that need other libraries."""
    if re.match(NOT_IMPORTED, name):
        path = ROOT.joinpath(*name.split("."))
        return path.with_suffix(".py").exists() or path.name in defined()
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.quick
def test_names_of_code_on_a_page_exist(page: Path) -> None:
    missing = sorted({name for name in named(page) if not exists(name)})
    assert not missing, f"{page.name} names what does not exist: {', '.join(missing)}"


def test_a_name_that_does_not_exist_is_found() -> None:
    wrong = ["AutogradDriver.is_reduced", "no_such_function", "torch.no_such", "model.reduced"]
    assert not [name for name in wrong if exists(name)]
    assert exists("AutogradDriver.group")
