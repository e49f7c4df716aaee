"""Nothing that another rank has sent is unpickled or executed, and temporary files are private."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from launched import ROOT
from torch import nn

from tritonddp import DistributedDataParallel
from tritonddp.coordination.group import Group
from tritonddp.coordination.verify import verify_same

LIBRARY = [*(ROOT / "tritonddp").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
OTHERS = [*(ROOT / "benchmarks").rglob("*.py")]

MODULES = dict.fromkeys(
    ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"),
    "what it loads may run code",
)
FUNCTIONS = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "mktemp": "another user may take the name first",
    "system": "runs text in a shell",
    "popen": "runs text in a shell",
    "getoutput": "runs text in a shell",
}
OBJECTS = dict.fromkeys(
    (
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "scatter_object_list",
        "send_object_list",
        "recv_object_list",
    ),
    "unpickles what other ranks send",
)
# Folders in which all users of a machine may write.
SHARED = ("/tmp", "/var/tmp", "/dev/shm")


def found_in(code: str, are_objects_refused: bool = True) -> Iterator[str]:
    """What a program should not do, with its line."""
    refused = FUNCTIONS | (OBJECTS if are_objects_refused else {})
    tree = ast.parse(code)
    texts = {
        id(node.value)  # docstrings
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            if name.partition(".")[0] in MODULES:
                yield f"line {node.lineno}: {name}: {MODULES[name.partition('.')[0]]}"
        if isinstance(node, ast.Call):
            yield from _found_in_call(node, refused)
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in texts and node.value.startswith(SHARED):
            yield f"line {node.lineno}: {node.value}: a name that others can guess"


def _found_in_call(call: ast.Call, refused: dict[str, str]) -> Iterator[str]:
    function = call.func
    options = {each.arg: each.value for each in call.keywords}
    if isinstance(function, ast.Name):
        owner, name = "", function.id
    elif isinstance(function, ast.Attribute):
        owner, name = ast.unparse(function.value), function.attr
    else:
        return
    is_method = name in ("eval", "exec") and owner  # module.eval() is something else
    if name in refused and not is_method:
        yield f"line {call.lineno}: {name}: {refused[name]}"
    safe = options.get("weights_only")
    if (owner, name) == ("torch", "load") and not (
        isinstance(safe, ast.Constant) and safe.value is True
    ):
        yield f"line {call.lineno}: torch.load without weights_only=True: unpickles"
    if "shell" in options:
        yield f"line {call.lineno}: shell: runs text in a shell"


@pytest.mark.parametrize("path", LIBRARY + OTHERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_does_what_it_should_not(path: Path) -> None:
    assert list(found_in(path.read_text(), path in LIBRARY)) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from marshal import loads",
        "eval(text)",
        "dist.all_gather_object(every, mine)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "tempfile.mktemp()",
        "store = dist.FileStore('/tmp/store')",
    ],
)
def test_what_should_not_be_done_is_found(code: str) -> None:
    assert len(list(found_in(code))) == 1
    fine = "model.eval(); torch.load(path, weights_only=True); run(['/bin/true'])\n'''/tmp'''"
    assert list(found_in(fine)) == []


@ranks(2)
def test_what_another_rank_says_is_one_line_of_text_and_bounded(rank: int) -> None:
    hostile = "\x1b[2Jgone\n" * 10_000 if rank else "what it is"
    description = {"parameter": {}, "buffer": {}, "option": {"colour": hostile}}
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(RuntimeError, match="option 'colour': rank 0 has what it is") as caught:
        verify_same(description, Group(group), torch.device("cpu"))
    heading, line, remedy = str(caught.value).splitlines()
    assert "\x1b" not in line
    assert len(line) < 1_100
    assert all((heading, remedy))


@ranks(2)
def test_the_program_of_another_rank_stays_there(rank: int) -> None:
    """Names and options travel as JSON: what would be code elsewhere is a text."""
    net = nn.Module()
    name = "__import__('os')_system('false')" if rank else "weight"
    net.register_parameter(name, nn.Parameter(torch.ones(2)))
    with pytest.raises(RuntimeError, match="__import__"):
        DistributedDataParallel(net)
