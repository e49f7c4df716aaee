"""What the pages name exists: code, tests, files, links, calls. `make docs` checks the site."""

import builtins
import pkgutil
import re
from functools import cache

import torch
import torch.distributed as dist
from differential.named import PROGRAMS
from launched import ROOT
from torch import nn
from torch.distributed.algorithms import join

CASES_PAGE = ROOT / "tests" / "differential" / "named" / "README.md"
ROOT_PAGES = [ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")]
PAGES = {
    page: page.read_text() for page in [*(ROOT / "docs").glob("*.md"), *ROOT_PAGES, CASES_PAGE]
}
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
ACTIONS = "../../actions/workflows/"
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")
FILE = re.compile(r"`((?:tests|examples|benchmarks|tritonddp)/[\w/]+(?:\.py)?)[` ]")
ROW = re.compile(r"^\| (.*) \| ([^|]*) \| ([^|]*) \| `(\w+)` \|$", re.MULTILINE)

# Names of code

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
FILE_NAME = re.compile(r"\.(py|md|toml|cff|yml|txt|json)$")
NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\(.*\))?")


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


def test_names_of_code_in_inline_code_exist() -> None:
    """``name()`` and ``owner.attribute``."""
    missing = {
        (page.name, found[1])
        for page, text in PAGES.items()
        for code in re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
        if (found := NAME.fullmatch(code)) and (found[2] or "." in found[1])
        if not FILE_NAME.search(code) and not exists(found[1])
    }
    assert not missing
    assert not exists("AutogradDriver.is_gone")
    assert exists("AutogradDriver.group")


# Tests, files, links, calls


def test_a_test_or_file_that_a_page_names_exists() -> None:
    text = "\n".join(PAGES.values())
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    files = FILE.findall(text)
    assert len(tests) > 5
    assert len(files) > 20
    for path, name in tests:
        assert name.startswith("test_")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), name
    assert not [path for path in files if not (ROOT / path).exists()]


def test_the_page_of_cases_has_each_once_with_the_results_of_stock() -> None:
    rows = ROW.findall(PAGES[CASES_PAGE])
    found = {name: (default, flagged) for _, default, flagged, name in rows}
    assert found == {name: each.stock for name, each in PROGRAMS.items()}
    assert len(rows) == len(found)


def test_a_call_in_the_page_of_one_backward_is_in_its_file() -> None:
    page = PAGES[ROOT / "docs" / "one-backward.md"]
    calls = re.findall(r"^ [^.\n]*?(\w+)\.(\w+).* (\w+\.py)$", page, re.MULTILINE)
    assert len(calls) > 20
    for owner, call, file in calls:
        (path,) = (ROOT / "tritonddp").rglob(file)
        assert re.search(rf"(def |self\.){call}\b", path.read_text()), f"{owner}.{call} in {file}"


def test_a_link_of_a_page_leads_to_a_file_and_to_a_heading_in_it() -> None:
    others = [ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
    pages = PAGES | {page: page.read_text() for page in others}
    links = [(page, *link) for page, text in pages.items() for link in LINK.findall(text)]
    assert len(links) > 20
    for page, path, anchor in links:
        target = (page.parent / path).resolve() if path else page
        if path.startswith(ACTIONS):  # a page of GitHub
            workflow = path.removeprefix(ACTIONS).removesuffix("/badge.svg")
            target = ROOT / ".github" / "workflows" / workflow
        assert target.exists(), f"{page.name} links to {path}"
        is_there = not anchor or anchor in anchors(target.read_text())
        assert is_there, f"{page.name} links to {path}#{anchor}"


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a text."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short_enough_to_read_to_its_end() -> None:
    assert len(PAGES[ROOT / "README.md"].splitlines()) <= 120
