"""The structure of the package: sizes of rooms, files and functions, and access between them.

The limits are here. If a change exceeds one, move the code, do not raise the limit.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tritonddp

ROOT = Path(tritonddp.__file__).parent
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.rglob("*.py")}
TREES = {name: ast.parse(text) for name, text in SOURCES.items()}
NODES = {name: list(ast.walk(tree)) for name, tree in TREES.items()}

FILES_A_ROOM = 12
LINES_A_FILE = 760
# The file that may use private names of torch.
TORCH = "_torch.py"
# In these rooms, only the file of a class sets its attributes, except those of these records.
CORE = ("buckets/", "comm/", "coordination/", "reducer/")
RECORDS = ("Counters", "SyncState", "DDPState")
# Attributes of tensors and modules, and properties, with the same names as attributes of the core.
WRITES_TO_OTHERS = {"grad", "backward", "memory", "peers", "max_bytes"}
# Private attributes of tensors, of modules and of stock DDP, and the wrapper's attributes that
# other rooms read.
SHARED_PRIVATE = {
    *("_version", "_modules", "_forward_pre_hooks", "_flat_weights"),
    *("_ddp_params_and_buffers_to_ignore", "_ddp_ignored", "_fp_param", "_mp_param"),
    *("_ddp_state", "_comm_hooks"),
}


def every(*kinds: type[Any]) -> Iterator[tuple[str, Any]]:
    """All nodes of these kinds, each with its file."""
    return ((name, node) for name, nodes in NODES.items() for node in nodes if type(node) in kinds)


def stores(node: ast.AST, is_own: bool) -> Iterator[ast.Attribute]:
    """The attributes that the code of a node sets, of ``self`` or of other objects."""
    for each in ast.walk(node):
        is_store = isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if is_store and (ast.unparse(each.value) in ("self", "cls")) is is_own:
            yield each


def targets(node: ast.AST) -> list[Any]:
    """The targets of an assignment."""
    return [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])


def test_rooms_and_files_are_not_too_large() -> None:
    folders = Counter(Path(name).parent for name in SOURCES if "__init__" not in name)
    assert not {folder: count for folder, count in folders.items() if count > FILES_A_ROOM}
    lines = {name: text.count("\n") for name, text in SOURCES.items()}
    assert not {name: count for name, count in lines.items() if count > LINES_A_FILE}


def test_attributes_of_the_core_are_set_in_the_file_of_their_class() -> None:
    files: dict[str, set[str]] = defaultdict(set)  # by attribute
    records: set[str] = set()
    for file, node in every(ast.ClassDef):
        names = {each.attr for each in stores(node, True)}
        for each in node.body:
            names |= {ast.unparse(target) for target in targets(each)}
        records |= names if node.name in RECORDS else set()
        for name in names:
            files[name].add(file)
    wrong = {
        f"{file}: {ast.unparse(store)}"
        for file, tree in TREES.items()
        for store in stores(tree, False)
        if store.attr not in records | WRITES_TO_OTHERS
        and file not in files[store.attr]
        and any(each.startswith(CORE) for each in files[store.attr])
    }
    assert not wrong


def test_rooms_do_not_use_private_names_of_other_rooms() -> None:
    room: Callable[[str], str] = lambda name: name.rpartition("/")[0].partition("/")[0]  # noqa: E731
    defined: dict[str, set[str]] = defaultdict(set)
    for name, tree in TREES.items():
        defined[room(name)] |= {each.attr for each in stores(tree, True)}
    for name, node in every(ast.FunctionDef, ast.ClassDef):
        defined[room(name)].add(node.name)
    for name, node in every(ast.Name):
        if isinstance(node.ctx, ast.Store):
            defined[room(name)].add(node.id)
    wrong = {
        f"{name}: {ast.unparse(node)}"
        for name, node in every(ast.Attribute)
        if re.match(r"_[^_]", node.attr)
        and name != TORCH
        and ast.unparse(node.value) not in ("self", "cls", "super()")
        and node.attr not in SHARED_PRIVATE | defined[room(name)]
    }
    assert not wrong


def test_private_names_of_torch_are_in_one_file() -> None:
    used = [(name, ast.unparse(node)) for name, node in every(ast.Attribute)]
    used += [
        (name, f"{node.module}.{alias.name}")
        for name, node in every(ast.ImportFrom)
        for alias in node.names
    ]
    private = r"(torch|dist)\.(\w+\.)*_[^_]"
    assert not {each for each in used if each[0] != TORCH and re.match(private, each[1])}
