"""The form of the package: how much a folder, a file and a class may hold, and who may know what.

What is allowed is written here, and nothing is beyond it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

from objects import Nodes, dotted, foreign_writes

import tritonddp

ROOT = Path(tritonddp.__file__).parent
SOURCES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}
NODES: Nodes = {name: list(ast.walk(tree)) for name, tree in TREES.items()}

FILES_A_ROOM = 12
LINES_A_FILE = 800
# Files within 5 % of it, each with the reason why it is one.
LONG: dict[str, str] = {}
# The functions of ``AutogradDriver`` that every step enters, with the most branches of each:
# a rare case is a function of its own, behind one question.
BRANCHES = {
    "before_forward": 3,
    "on_backward": 8,
    "_prepare_for_backward": 7,
    "_compute_ended": 7,
    "finalize_backward": 7,
}
# The rooms whose objects nobody else writes to.
CORE = ("buckets/", "comm/", "coordination/", "reducer/")
# What looks like it: an attribute of a tensor or a module of torch, or a property with a setter.
WRITES_TO_OTHERS = {"grad", "backward", "memory", "peers", "max_bytes"}
LEVELS_OF_CLASSES = 2
# The one file that may use private names of torch.
TORCH = "_torch.py"

# Private attributes that torch's own objects have: of tensors and modules, and those by which stock
# DDP marks them.
OF_TORCHS_OBJECTS = {
    *("_version", "_modules", "_forward_pre_hooks", "_flat_weights"),
    *("_ddp_params_and_buffers_to_ignore", "_ddp_ignored", "_fp_param", "_mp_param"),
}

# Private attributes of a wrapper that rooms below it read.
OF_WRAPPERS = {"_ddp_state", "_comm_hooks"}

# WeakKeyDictionary and WeakSet at the level of a module: what ranks share, by process group; the
# threads of an exchange, which have to end before the interpreter.
REGISTRIES = {"coordination/group.py: _shared", "comm/parts.py: _threads"}

# The name of a function that asks.
ASKS = r"_*(is|are|was|were|has|have|may|needs|wants|can)_"

# The classes whose attributes each step reads.
HOT = (
    "Bucket",
    "BucketManager",
    "BucketSet",
    "GradStorage",
    "AutogradDriver",
    "Reduction",
    "Segment",
)
# Their properties, none of which a step reads.
COLD_PROPERTIES = {
    *("Bucket.title", "Bucket.wire_dtype", "BucketManager.order", "Reduction.group"),
    *("AutogradDriver.backward_runs", "AutogradDriver.bucket_set", "AutogradDriver.order"),
}

# Words that are no terms of the field.
RETIRED = (
    *("arrangement", "at_once", "attendance", "ballot", "between", "cede", "follower", "in_step"),
    *("poison", "roll_call", "rollcall", "roster", "whereabouts", "said", "told", "came", "follow"),
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
    for nodes in NODES.values():
        for node in nodes:
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


def reaches() -> set[str]:
    """`other._name` in a room that does not define `_name` itself."""
    defined: dict[str, set[str]] = defaultdict(set)
    used: list[tuple[str, str, str]] = []
    for name, nodes in NODES.items():
        room = room_of(name)
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined[room].add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined[room].add(node.id)
            elif isinstance(node, ast.Attribute):
                owner = dotted(node.value)
                if owner in ("self", "cls") and isinstance(node.ctx, ast.Store):
                    defined[room].add(node.attr)
                elif (
                    name != TORCH
                    and owner not in ("self", "cls", "super()")
                    and re.match(r"_[^_]", node.attr)
                    and node.attr not in OF_TORCHS_OBJECTS | OF_WRAPPERS
                ):
                    used.append((name, owner, node.attr))
    return {
        f"{name}: {owner}.{attr}"
        for name, owner, attr in used
        if attr not in defined[room_of(name)]
    }


def imports() -> dict[str, set[str]]:
    """Of each file those that it imports, in functions too; not for the type checker alone."""
    found: dict[str, set[str]] = {}
    for name, tree in TREES.items():
        targets = found[name] = set[str]()
        nodes: list[ast.AST] = [tree]
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                nodes += node.orelse
                continue
            nodes += ast.iter_child_nodes(node)
            if isinstance(node, ast.Import):
                modules = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{each.name}" for each in node.names] + [str(node.module)]
            else:
                continue
            paths = {module.replace(".", "/").removeprefix("tritonddp/") for module in modules}
            targets |= {f"{path}.py" for path in paths} & TREES.keys()
    return found


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
    for name, nodes in NODES.items():
        if name == TORCH:
            continue
        for node in nodes:
            text = ""
            if isinstance(node, ast.Attribute):
                text = dotted(node)
            elif isinstance(node, ast.ImportFrom):
                text = " ".join(f"{node.module}.{alias.name}" for alias in node.names)
            found |= {
                f"{name}: {each}"
                for each in text.split()
                if re.match(r"(torch|dist)\.(\w+\.)*_[^_]", each)
            }
    return found


def properties() -> set[str]:
    return {
        f"{node.name}.{each.name}"
        for nodes in NODES.values()
        for node in nodes
        if isinstance(node, ast.ClassDef) and node.name in HOT
        for each in node.body
        if isinstance(each, ast.FunctionDef)
        and any(dotted(decorator) == "property" for decorator in each.decorator_list)
    }


def names_in(nodes: list[ast.AST]) -> set[str]:
    values = (
        getattr(node, field, None)
        for node in nodes
        for field in ("id", "attr", "arg", "name", "module")
    )
    return {value for value in values if isinstance(value, str)}


def retired() -> set[str]:
    """In names, not in texts: whole words of snake_case and of CamelCase."""
    words = re.compile(rf"(^|[_.])({'|'.join(RETIRED)})(s|d)?($|[_.])")
    return {
        f"{file}: {name}"
        for file, nodes in NODES.items()
        for name in names_in(nodes)
        if words.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    }


def test_rooms_are_not_too_large() -> None:
    assert not large_rooms()


def test_files_are_not_too_long() -> None:
    assert not long_files()


def test_a_file_that_is_almost_too_long_says_why() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in SOURCES.items()}
    assert {name for name, count in lines.items() if count > 0.95 * LINES_A_FILE} == set(LONG)


def test_what_every_step_enters_has_few_branches() -> None:
    functions = {
        node.name: node
        for node in NODES["reducer/autograd_driver.py"]
        if isinstance(node, ast.FunctionDef) and node.name in BRANCHES
    }
    kinds = ast.If, ast.IfExp, ast.While
    counts = {
        name: sum(isinstance(each, kinds) for each in ast.walk(node))
        for name, node in functions.items()
    }
    assert counts.keys() == BRANCHES.keys()
    assert not {name: n for name, n in counts.items() if n > BRANCHES[name]}


def test_the_phase_of_a_backward_is_set_by_one_method() -> None:
    """By ``Backward.moves_to()``, which refuses a phase that cannot follow."""
    setters = [
        f"{file}: {function.name}"
        for file, nodes in NODES.items()
        for function in nodes
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr == "phase"
        if isinstance(node.ctx, ast.Store)
    ]
    assert setters == ["reducer/graph/backward.py: moves_to"]


def test_a_logger_has_the_name_of_its_module() -> None:
    calls = [node for nodes in NODES.values() for node in nodes if isinstance(node, ast.Call)]
    names = {ast.unparse(c.args[0]) for c in calls if dotted(c.func) == "logging.getLogger"}
    assert names == {"__name__"}


def test_attributes_of_the_core_are_set_in_the_file_of_their_class() -> None:
    found = foreign_writes(NODES, CORE)
    assert not [each for each in found if each.rpartition(".")[2] not in WRITES_TO_OTHERS]


def test_a_name_that_asks_changes_nothing() -> None:
    """A function ``is_...`` or ``has_...`` sets no attribute and no global, and only returns."""
    changed = []
    for file, tree in TREES.items():
        functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
        for each in functions:
            if not re.match(ASKS, each.name):
                continue
            for node in ast.walk(each):
                is_set = isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
                if is_set or isinstance(node, ast.Global | ast.Nonlocal):
                    changed.append(f"{file}: {each.name}")
    assert not changed


def test_classes_have_one_base_at_most_and_few_levels() -> None:
    assert not towers()


def test_rooms_do_not_use_private_names_of_others() -> None:
    assert not reaches()


def test_no_imports_go_in_a_circle() -> None:
    """By ``CycleError``, which names the files."""
    assert len(list(TopologicalSorter(imports()).static_order())) == len(TREES)


def test_no_module_keeps_a_registry_of_its_own() -> None:
    assert registries() == REGISTRIES


def test_private_names_of_torch_are_in_one_file() -> None:
    assert not private_torch()


def test_what_each_step_reads_is_no_property() -> None:
    assert properties() == COLD_PROPERTIES


def test_names_are_those_of_the_field() -> None:
    assert not retired()


def test_a_room_says_its_question_and_nothing_else() -> None:
    for name, tree in TREES.items():
        if name.endswith("/__init__.py"):
            assert [type(node) for node in tree.body] == [ast.Expr], name
            assert ast.get_docstring(tree), name
