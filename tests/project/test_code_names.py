"""Names of code that a page has in backticks, ``name()`` and ``owner.attribute``, exist."""

import ast
import builtins
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launched import ROOT
from torch import nn
from torch.distributed.algorithms import join

import tritonddp
from tritonddp import DistributedDataParallel

PACKAGE = Path(tritonddp.__file__).parent
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "tests/differential/named/README.md")
    ),
]

# What pages call objects of the user, and of the package: their classes.
OBJECTS: dict[str, Any] = {
    "model": DistributedDataParallel,
    "ddp": DistributedDataParallel,
    "module": nn.Module,
    "optimizer": torch.optim.Optimizer,
    "scaler": torch.amp.GradScaler,
    "grad_fn": torch.autograd.graph.Node,
    "bucket": ("Bucket",),
    "reducer": ("AutogradDriver", "StockReducer"),
}
MODULES = {"nn": nn, "dist": dist, "autograd": torch.autograd}
# Of other libraries, and of a program that a page shows.
OTHERS = re.findall(
    r"[\w.]+",
    """DDP DistributedDataParallelKwargs Fabric Trainer backward dcp.async_save distrib_ctx
    get_gradients idist.auto_model launch main make_private prepare prepare_model
    ray.train.torch.prepare_model reduce_parameters state_dict tr train""",
)
FILE = re.compile(r"\.(py|md|toml|cff|yml|txt|json)$")
NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\(.*\))?")


def named(page: Path) -> Iterator[str]:
    """``owner.attribute`` or ``name``, which is called, of the inline code of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", text):
        found = NAME.fullmatch(code)
        if found and (found[2] or "." in found[1]) and not FILE.search(code):
            yield found[1]


class Sources:
    """What the package defines, by the names that pages use.

    Attributes:
        classes: attributes of each class, without those of its bases; and its bases.
        modules: what each file defines, by its name without the folder.
        anywhere: functions, methods and classes.
        texts: strings, such as names of loggers.
    """

    def __init__(self) -> None:
        self.classes: dict[str, set[str]] = defaultdict(set)
        self.bases: dict[str, list[str]] = {}
        self.modules: dict[str, set[str]] = defaultdict(set)
        self.texts: set[str] = set()
        for path in PACKAGE.rglob("*.py"):
            self._read(path.stem, ast.parse(path.read_text()))
        self.anywhere = set().union(*self.modules.values(), *self.classes.values(), self.classes)

    def _read(self, module: str, tree: ast.Module) -> None:
        self.modules[module] |= _defined(tree.body)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.texts.add(node.value)
            elif isinstance(node, ast.ClassDef):
                self.bases[node.name] = [ast.unparse(base) for base in node.bases]
                self.classes[node.name] |= _defined(node.body) | {
                    each.attr
                    for each in ast.walk(node)
                    if isinstance(each, ast.Attribute)
                    and isinstance(each.ctx, ast.Store)
                    and ast.unparse(each.value) == "self"
                }

    def has(self, owner: str, attribute: str) -> bool:
        own = self.classes.get(owner, set())
        return attribute in own or any(
            self.has(base, attribute) for base in self.bases.get(owner, [])
        )


def _defined(body: list[ast.stmt]) -> set[str]:
    found = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            found.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign):
            found |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.If | ast.Try):
            found |= _defined(node.body)
    return found


sources = cache(Sources)


def exists(name: str) -> bool:
    owner, _, attribute = name.rpartition(".")
    if name in OTHERS or name in sources().texts:
        return True
    if not owner:
        return name in sources().anywhere or any(
            hasattr(each, name)
            for each in (DistributedDataParallel, torch.Tensor, dist, join, builtins)
        )
    first, *rest = name.split(".")
    kind = OBJECTS.get(first)
    if isinstance(kind, tuple):
        return any(sources().has(each, rest[0]) for each in kind)
    if kind is not None:  # of a module that is wrapped, or an argument of the user's
        return hasattr(kind, rest[0]) or (rest[0] == "module" and kind is DistributedDataParallel)
    if owner in sources().classes:
        return sources().has(owner, attribute)
    if attribute in sources().modules.get(owner, ()):
        return True
    return _is_of_package(rest) if first == "tritonddp" else _is_importable(name)


def _is_of_package(names: list[str]) -> bool:
    """Without an import: those of integrations bring in libraries that other tests do without."""
    path = PACKAGE.joinpath(*names)
    is_module = path.with_suffix(".py").exists() or path.is_dir()
    defined = sources().modules.get(names[-2], set()) if len(names) > 1 else set(dir(tritonddp))
    return is_module or names[-1] in defined


def _is_importable(name: str) -> bool:
    first, *rest = name.split(".")
    try:
        found = MODULES.get(first) or importlib.import_module(first)
    except ImportError:
        return False
    path = first
    for each in rest:
        path += f".{each}"
        if not hasattr(found, each):
            try:
                importlib.import_module(path)
            except ImportError:
                return False
        found = getattr(found, each)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.quick
def test_names_of_code_on_a_page_exist(page: Path) -> None:
    missing = sorted({name for name in named(page) if not exists(name)})
    assert not missing, f"{page.name} names what is not there: {', '.join(missing)}"


def test_a_name_that_is_not_there_is_found() -> None:
    wrong = ["AutogradDriver.is_reduced", "no_such_function", "torch.no_such", "model.reduced"]
    assert not [name for name in wrong if exists(name)]
    assert exists("AutogradDriver.group")
