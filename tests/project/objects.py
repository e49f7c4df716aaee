"""How large the objects of the core are, and what they know of each other: for test_shape.py."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

# By file all nodes of its syntax tree.
Nodes = dict[str, list[ast.AST]]
# Records of facts and counts, whose attributes others write.
RECORDS = {"Counters", "SyncState", "DDPState"}


@dataclass
class Class:
    """A class of the package.

    Attributes:
        attributes: what its instances have beside methods, without what they inherit.
    """

    file: str  # in which it is
    attributes: set[str] = field(default_factory=set)


@cache
def dotted(node: ast.expr) -> str:
    """The source of an expression, at once where it is names with dots (``unparse`` is slow)."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ast.unparse(node)


def classes(found: Nodes) -> dict[str, Class]:
    """The classes of a package, by name."""
    return {
        node.name: Class(file, _attributes(node))
        for file, nodes in found.items()
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }


def _attributes(node: ast.ClassDef) -> set[str]:
    found = {
        target.id
        for statement in node.body
        for target in _targets(statement)
        if isinstance(target, ast.Name)
    }
    for method in node.body:
        if isinstance(method, ast.FunctionDef):
            found |= {
                target.attr
                for statement in ast.walk(method)
                for target in _targets(statement)
                if isinstance(target, ast.Attribute) and dotted(target.value) == "self"
            }
    return {each for each in found if not each.isupper()} - {"__slots__"}


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to."""
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        yield node.target
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]


def foreign_writes(found: Nodes, rooms: tuple[str, ...]) -> list[str]:
    """Attributes of classes of these rooms that are assigned in another file than their class's."""
    files_of: dict[str, set[str]] = defaultdict(set)
    exempt = set()
    for name, made in classes(found).items():
        for attribute in made.attributes:
            files_of[attribute].add(made.file)
            exempt |= {attribute} if name in RECORDS else set()
    wrong = []
    for file, nodes in found.items():
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner, files = dotted(node.value), files_of.get(node.attr, set())
                is_foreign = owner not in ("self", "cls") and files and file not in files
                if is_foreign and any(each.startswith(rooms) for each in files):
                    wrong += [f"{file}: {owner}.{node.attr}"] * (node.attr not in exempt)
    return wrong
