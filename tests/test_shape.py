"""The form of the package: how much a folder, a file and a class may hold, and who may know what.

Each list and number below is what is there today, beyond what is allowed in the end. They may only
shrink: a test also fails where less is there than is written here, so that it is written down.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import tritonddp

ROOT = Path(tritonddp.__file__).parent
SOURCES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}

FILES_A_ROOM = 10
LINES_A_FILE = 800
LEVELS_OF_CLASSES = 2
# The one file that may use private names of torch.
TORCH = "_torch.py"

# Rooms with more files than FILES_A_ROOM, without their __init__.py, which is empty.
LARGE_ROOMS: dict[str, int] = {
    "buckets": 12,
    "reducer": 11,
}

# Files with more than LINES_A_FILE lines.
LONG_FILES: dict[str, int] = {}

# Classes with more than one base of this package, or more than LEVELS_OF_CLASSES such classes above
# each other: their own bases, and how many levels.
TOWERS: dict[str, list[str]] = {
    "BetweenBackwards": ["InStep", "4 levels"],
    "DistributedDataParallel": [
        "SyncsBuffers",
        "StockNames",
        "BeyondStock",
        "CommState",
        "TakesHooks",
        "Finalizes",
        "Follower",
        "2 levels",
    ],
    "InContext": ["OnRequest", "7 levels"],
    "InStep": ["ReducerState", "3 levels"],
    "LazyViewBucket": ["LazyBucket", "ViewBucket", "3 levels"],
    "OnRequest": ["Resumes", "6 levels"],
    "Reducer": ["InContext", "8 levels"],
    "Resumes": ["BetweenBackwards", "5 levels"],
}

# `other._name` in a room that does not define `_name` itself: how often, by room.
REACHES: dict[str, int] = {
    ".": 1,
    "buckets": 7,
    "compat": 2,
    "diagnostics": 9,
    "features": 11,
    "integrations": 2,
}

# WeakKeyDictionary and WeakSet at the level of a module.
REGISTRIES: set[str] = {
    "buckets/parameters.py: _wrappers",
    "comm/quantized.py: _numbers",
    "comm/quantized.py: _threads",
    "coordination/failures.py: _failures",
    "coordination/forks.py: _inherited",
    "coordination/processes.py: _announced",
    "coordination/processes.py: _first",
    "ddp.py: _alive",
    "reducer/state.py: reducers",
}

# Private names of torch outside of TORCH.
PRIVATE_TORCH: set[str] = set()

# Properties of classes that each step passes.
PROPERTIES: dict[str, int] = {
    "Arrangement": 3,
    "Bucket": 4,
    "ReducerState": 4,
}

# How often each of these words, which are no terms of the field, is in the package's code.
RETIRED: dict[str, int] = {
    "arrangement": 35,
    "at_once": 12,
    "attendance": 37,
    "ballot": 210,
    "between": 9,
    "cede": 15,
    "follower": 4,
    "in_step": 3,
    "poison": 8,
    "roll_call": 57,
    "roster": 97,
}


# The classes whose attributes are read in each step, and the words that others will replace.
_HOT = (
    "Arrangement",
    "Bucket",
    "Placement",
    "Reducer",
    "ReducerState",
    "ReductionRun",
    "ViewBucket",
)
_WORDS = (
    *("arrangement", "at_once", "attendance", "ballot", "between", "cede", "follower", "in_step"),
    *("poison", "roll_call", "rollcall", "roster", "whereabouts"),
)


def room_of(name: str) -> str:
    return name.partition("/")[0] if "/" in name else "."


def large_rooms() -> dict[str, int]:
    folders = Counter(Path(name).parent.as_posix() for name in SOURCES if "__init__" not in name)
    return {folder: count for folder, count in folders.items() if count > FILES_A_ROOM}


def long_files() -> dict[str, int]:
    lines = {name: len(path.read_text().splitlines()) for name, path in SOURCES.items()}
    return {name: count for name, count in lines.items() if count > LINES_A_FILE}


def towers() -> dict[str, list[str]]:
    classes: dict[str, list[str]] = {}
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = [
                    base.value if isinstance(base, ast.Subscript) else base for base in node.bases
                ]
                classes[node.name] = [ast.unparse(base).rpartition(".")[2] for base in bases]
    own = {name: [base for base in bases if base in classes] for name, bases in classes.items()}

    def levels(name: str) -> int:
        return 1 + max(map(levels, own[name]), default=0)

    return {
        name: [*bases, f"{levels(name)} levels"]
        for name, bases in sorted(own.items())
        if len(bases) > 1 or levels(name) > LEVELS_OF_CLASSES
    }


def reaches() -> dict[str, int]:
    """Of an object that is not ``self``; names that start and end with ``__`` are not private."""
    defined: dict[str, set[str]] = defaultdict(set)
    used: dict[str, Counter[str]] = defaultdict(Counter)
    for name, tree in TREES.items():
        room = room_of(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined[room].add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined[room].add(node.id)
            elif isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                if owner in ("self", "cls") and isinstance(node.ctx, ast.Store):
                    defined[room].add(node.attr)
                elif (
                    name != TORCH
                    and owner not in ("self", "cls", "super()")
                    and re.match(r"_[^_]", node.attr)
                ):
                    used[room][node.attr] += 1
    counts = {
        room: sum(count for attr, count in names.items() if attr not in defined[room])
        for room, names in used.items()
    }
    return {room: count for room, count in sorted(counts.items()) if count}


def registries() -> set[str]:
    found = set()
    for name, tree in TREES.items():
        for node in tree.body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if value is not None and re.search(r"Weak(KeyDictionary|Set)\(", ast.unparse(value)):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                found.add(f"{name}: {ast.unparse(target)}")
    return found


def private_torch() -> set[str]:
    found = set()
    for name, tree in TREES.items():
        if name == TORCH:
            continue
        for node in ast.walk(tree):
            text = ""
            if isinstance(node, ast.Attribute):
                text = ast.unparse(node)
            elif isinstance(node, ast.ImportFrom):
                text = " ".join(f"{node.module}.{alias.name}" for alias in node.names)
            found |= {
                f"{name}: {each}"
                for each in text.split()
                if re.match(r"(torch|dist)\.(\w+\.)*_[^_]", each)
            }
    return found


def properties() -> dict[str, int]:
    counts: Counter[str] = Counter()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name in _HOT:
                counts[node.name] += sum(
                    ast.unparse(decorator) == "property"
                    for each in node.body
                    if isinstance(each, ast.FunctionDef)
                    for decorator in each.decorator_list
                )
    return {name: count for name, count in sorted(counts.items()) if count}


def names_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield value


def retired() -> dict[str, int]:
    """In names, not in texts: whole words of snake_case and of CamelCase."""
    counts: Counter[str] = Counter()
    for tree in TREES.values():
        for name in names_in(tree):
            snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
            counts.update(
                word for word in _WORDS if re.search(rf"(^|[_.]){word}(s|d)?($|[_.])", snake)
            )
    return {word: counts[word] for word in sorted(counts)}


def test_rooms_are_not_too_large() -> None:
    assert large_rooms() == LARGE_ROOMS


def test_files_are_not_too_long() -> None:
    assert long_files() == LONG_FILES


def test_classes_have_one_base_at_most_and_few_levels() -> None:
    assert towers() == TOWERS


def test_rooms_do_not_use_private_names_of_others() -> None:
    assert reaches() == REACHES


def test_no_module_keeps_a_registry_of_its_own() -> None:
    assert registries() == REGISTRIES


def test_private_names_of_torch_are_in_one_file() -> None:
    assert private_torch() == PRIVATE_TORCH


def test_what_each_step_reads_is_no_property() -> None:
    assert properties() == PROPERTIES


def test_names_are_those_of_the_field() -> None:
    assert retired() == RETIRED


def test_a_room_says_its_question_and_nothing_else() -> None:
    for name, tree in TREES.items():
        if name.endswith("/__init__.py"):
            assert [type(node) for node in tree.body] == [ast.Expr], name
            assert ast.get_docstring(tree), name
