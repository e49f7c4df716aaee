"""The form of the benchmarks: small rooms, and no circle of imports (their order: lint-imports)."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import TopologicalSorter

from launched import ROOT

FILES_A_ROOM = 10
LINES_A_FILE = 760
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in (ROOT / "benchmarks").rglob("*.py")
}


def imported(name: str) -> set[str]:
    """Modules of the benchmarks that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(SOURCES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & set(SOURCES)


def test_rooms_and_files_are_small() -> None:
    rooms = Counter(name.rpartition(".")[0] for name in SOURCES if not name.endswith("__init__"))
    assert not {room: count for room, count in rooms.items() if count > FILES_A_ROOM}
    lines = {name: len(path.read_text().splitlines()) for name, path in SOURCES.items()}
    assert not {name: count for name, count in lines.items() if count > LINES_A_FILE}


def test_imports_go_in_no_circle() -> None:
    order = list(TopologicalSorter({name: imported(name) for name in SOURCES}).static_order())
    assert set(order) == set(SOURCES)


def test_a_room_says_its_question_and_nothing_else() -> None:
    for name, path in SOURCES.items():
        if name.endswith("__init__"):
            assert [type(node) for node in ast.parse(path.read_text()).body] == [ast.Expr], name
