"""How large the objects of the core are, and how much they know of each other.

``python tests/project/objects.py [TREE]`` prints it for the package in a working tree, by default
this one; ``tests/project/test_shape.py`` holds some of it. What a variable holds is told by its
name: ``reduction``, ``self._reducer`` and so on.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# Names of variables and attributes that hold an object of this class.
HOLDERS = {
    "Reducer": {"core", "reducer", "_core", "_reducer", "told"},
    "ReductionRun": {"run", "added", "local", "last", "_run"},
    "Reduction": {"reduction", "added", "shadow", "last", "_reduction"},
    "Backward": {"backward", "local"},
    "Bucket": {"bucket", "each", "b"},
}
# Records of facts and counts, whose attributes others write.
RECORDS = {"Counters", "Statistics", "SyncState", "DDPState"}
# The objects of one backward: their booleans tell how far it is.
OF_A_BACKWARD = ("ReductionRun", "Reduction", "Backward")


@dataclass
class Class:
    """A class of the package.

    Attributes:
        file: in which it is.
        attributes: what its instances have beside methods.
        members: attributes, methods and properties without a leading underscore.
        phases: booleans that change after the constructor.
    """

    file: str
    attributes: set[str] = field(default_factory=set)
    members: set[str] = field(default_factory=set)
    phases: set[str] = field(default_factory=set)


def trees(root: Path) -> dict[str, ast.Module]:
    """The syntax trees of a package, by file."""
    return {
        path.relative_to(root).as_posix(): ast.parse(path.read_text())
        for path in sorted(root.rglob("*.py"))
    }


def classes(found: dict[str, ast.Module]) -> dict[str, Class]:
    """The classes of a package, by name, without what they inherit."""
    named: dict[str, Class] = {}
    for file, tree in found.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                named[node.name] = _class(node, file)
    return named


def _class(node: ast.ClassDef, file: str) -> Class:
    made, methods = Class(file), [each for each in node.body if isinstance(each, ast.FunctionDef)]
    booleans = set()
    for statement in node.body:
        for target, value in _assigned(statement):
            if isinstance(target, ast.Name):
                made.attributes.add(target.id)
                booleans |= {target.id} if _is_boolean(value) else set()
    for method in methods:
        for target, value in _assigned_in(method):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                made.attributes.add(target.attr)
                if _is_boolean(value) and method.name == "__init__":
                    booleans.add(target.attr)
                elif target.attr in booleans:
                    made.phases.add(target.attr)
    made.attributes = {each for each in made.attributes if not each.isupper()} - {"__slots__"}
    made.members = {each.name for each in methods} | made.attributes
    made.members = {each for each in made.members if not each.startswith("_")}
    made.phases |= {each for each in booleans if not each.startswith("_")} & _set_by_others
    return made


_set_by_others: set[str] = set()  # names of attributes that are assigned to another object


def _is_boolean(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, bool)


def _assigned_in(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    for statement in ast.walk(node):
        yield from _assigned(statement)


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """What a statement assigns to, and the values."""
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        yield node.target, node.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            elif isinstance(target, ast.Tuple):
                yield from ((each, None) for each in target.elts)
            else:
                yield target, node.value


def uses(
    found: dict[str, ast.Module], name: str, made: Class, only_writes: bool = False
) -> list[tuple[str, str]]:
    """Where members of a class are used outside of its file: file and member.

    Args:
        found: see :func:`trees`.
        name, made: the class.
        only_writes: where an attribute is assigned.
    """
    seen = []
    for file, tree in found.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or file == made.file:
                continue
            is_write = isinstance(node.ctx, ast.Store | ast.Del)
            holder = ast.unparse(node.value).removesuffix("()").rpartition(".")[2]
            is_member = node.attr in made.members | made.attributes
            if holder in HOLDERS[name] and is_member and (is_write or not only_writes):
                seen.append((file, node.attr))
    return seen


def foreign_writes(found: dict[str, ast.Module], rooms: tuple[str, ...]) -> list[str]:
    """Attributes of classes of these rooms that are assigned in another file than their class's."""
    files_of: dict[str, set[str]] = defaultdict(set)
    exempt = set()
    for name, made in classes(found).items():
        for attribute in made.attributes:
            files_of[attribute].add(made.file)
            exempt |= {attribute} if name in RECORDS else set()
    wrong = []
    for file, tree in found.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner, files = ast.unparse(node.value), files_of.get(node.attr, set())
                is_foreign = owner not in ("self", "cls") and files and file not in files
                if is_foreign and any(each.startswith(rooms) for each in files):
                    wrong += [f"{file}: {owner}.{node.attr}"] * (node.attr not in exempt)
    return wrong


def _note_set_by_others(found: dict[str, ast.Module]) -> None:
    for tree in found.values():
        for target, _ in _assigned_in(tree):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self":
                _set_by_others.add(target.attr)


def report(tree: Path) -> None:
    """Print the figures of the package in this working tree."""
    found = trees(tree / "tritonddp")
    _note_set_by_others(found)
    named = classes(found)
    rows: list[tuple[str, int, str]] = []
    for name in sorted(named, key=lambda each: -len(named[each].attributes))[:5]:
        rows.append((f"attributes of {name}", len(named[name].attributes), ""))
    for name in ("ReductionRun", "Reduction", "Backward", "Bucket"):
        if name in named:
            writes = uses(found, name, named[name], only_writes=True)
            attributes, files = {each for _, each in writes}, {file for file, _ in writes}
            what = f"{name}: attributes written outside its file"
            rows.append((what, len(attributes), f"in {len(files)} files"))
    outside = uses(found, "Reducer", named["Reducer"])
    rows.append(("uses of members of Reducer outside its file", len(outside), ""))
    phases = sorted(set().union(*(named[each].phases for each in OF_A_BACKWARD if each in named)))
    rows.append(("booleans for the phase of a backward", len(phases), ", ".join(phases)))
    lines = sum(len(each.read_text().splitlines()) for each in (tree / "tritonddp").rglob("*.py"))
    rows.append(("lines of the package", lines, ""))
    for what, number, more in rows:
        print(f"{what:52} {number:6}   {more}".rstrip())


if __name__ == "__main__":
    report(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2])
