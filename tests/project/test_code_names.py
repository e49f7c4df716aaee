"""Names of code that a page has in backticks, ``name()`` and ``owner.attribute``, exist."""

import builtins
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launched import ROOT
from torch import nn
from torch.distributed.algorithms import join

MORE = ("README.md", "CONTRIBUTING.md", "tests/differential/named/README.md")
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in MORE)]
# The objects that have the names on pages as attributes, unless the package defines them.
OBJECTS = (
    *(builtins, torch, torch.autograd, torch.autograd.graph.Node, torch.Tensor, dist, join),
    *(nn, nn.Module, nn.parallel.DistributedDataParallel),
    *(torch.optim.Optimizer, torch.amp.GradScaler),
)
# Names of other libraries, and of a program that a page shows.
OTHERS = re.findall(
    r"[\w.]+",
    """DDP DistributedDataParallelKwargs Fabric Trainer average dcp.async_save distrib_ctx
    get_gradients idist.auto_model launch main make_private prepare prepare_model module
    ray.train.torch.prepare_model reduce_parameters tr train""",
)
FILE = re.compile(r"\.(py|md|toml|cff|yml|txt|json)$")
NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\(.*\))?")


def named(page: Path) -> Iterator[str]:
    """Each ``owner.attribute`` and each called ``name`` in the inline code of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", text):
        found = NAME.fullmatch(code)
        if found and (found[2] or "." in found[1]) and not FILE.search(code):
            yield found[1]


@cache
def defined() -> set[str]:
    """All functions, classes, modules, attributes and strings of the package."""
    paths = [*(ROOT / "tritonddp").rglob("*.py")]
    text = "".join(path.read_text() for path in paths)
    pattern = r'\b(?:def|class) (\w+)|\bself\.(\w+)\b[^=\n]*= |^    (\w+): |"([\w.]+)"'
    found = {name for groups in re.findall(pattern, text, re.MULTILINE) for name in groups}
    return found | {path.stem for path in paths}


def exists(name: str) -> bool:
    last = name.rpartition(".")[2]
    if name in OTHERS or {name, last} & defined() or any(hasattr(each, last) for each in OBJECTS):
        return True
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.quick
def test_names_of_code_on_a_page_exist(page: Path) -> None:
    missing = sorted({name for name in named(page) if not exists(name)})
    assert not missing, f"{page.name} names what does not exist: {', '.join(missing)}"


def test_a_name_that_does_not_exist_is_found() -> None:
    assert not exists("AutogradDriver.is_gone")
    assert exists("AutogradDriver.group")
