"""Tests, files and links on the pages exist; the pages list every case and every library."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from differential.named import PROGRAMS
from launched import ROOT

CASES_PAGE = ROOT / "tests" / "differential" / "named" / "README.md"
ROOT_PAGES = [ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")]
PAGES = {page: page.read_text() for page in [*(ROOT / "docs").glob("*.md"), *ROOT_PAGES]}
PAGES[CASES_PAGE] = CASES_PAGE.read_text()
README_LINES = 120  # what a newcomer reads to the end
ACTIONS = "../../actions/workflows/"
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")
FILE = re.compile(r"`((?:tests|examples|benchmarks|tritonddp)/[\w/]+(?:\.py)?)[` ]")
ROW = re.compile(r"^\| (.*) \| ([^|]*) \| ([^|]*) \| `(\w+)` \|$", re.MULTILINE)


def test_a_test_or_file_that_a_page_names_exists() -> None:
    tests = files = 0
    for page, text in PAGES.items():
        for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
            body = ast.parse((ROOT / path).read_text()).body
            functions = {each.name for each in body if isinstance(each, ast.FunctionDef)}
            assert name in functions, f"{page.name} names {path}::{name}"
            assert name.startswith("test_"), f"pytest does not collect {path}::{name}"
            tests += 1
        for path in FILE.findall(text):
            assert (ROOT / path).exists(), f"{page.name} names {path}"
            files += 1
    assert tests > 5
    assert files > 20


def test_the_page_of_cases_has_each_once_with_the_results_of_stock() -> None:
    rows = ROW.findall(PAGES[CASES_PAGE])
    found = {name: (default, flagged) for _, default, flagged, name in rows}
    assert found == {name: each.stock for name, each in PROGRAMS.items()}
    assert len(rows) == len(found)


def test_the_page_of_frameworks_has_a_row_for_every_library_that_is_tested() -> None:
    page = PAGES[ROOT / "docs" / "frameworks.md"].lower()
    tables = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| "))
    letters = re.sub(r"[^a-z0-9\n]", "", tables)
    clients = "".join(path.read_text() for path in (ROOT / "tests" / "clients").glob("*.py"))
    names = re.findall(r"^def with_(\w+)", clients, re.MULTILINE)
    assert len(names) > 10
    assert not [name for name in names if name.replace("_", "") not in letters]


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
        if page.parent == ROOT and path.startswith(ACTIONS):  # a page of GitHub
            workflow = path.removeprefix(ACTIONS).removesuffix("/badge.svg")
            target = ROOT / ".github" / "workflows" / workflow
        assert target.exists(), f"{page.name} links to {path}"
        is_there = not anchor or anchor in anchors(target.read_text())
        assert is_there, f"{page.name} links to {path}#{anchor}"


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a text."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short_and_leads_to_all_pages() -> None:
    readme = ROOT / "README.md"
    assert len(readme.read_text().splitlines()) <= README_LINES
    found, ahead = set(), [readme]
    while ahead:
        page = ahead.pop()
        if page not in found and page.suffix == ".md":
            found.add(page)
            links = (path for path, _ in LINK.findall(page.read_text()) if path)
            ahead += [(page.parent / path).resolve() for path in links]
    assert set(PAGES) <= found, "no link leads there"


@pytest.mark.long
def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """``--strict``: a missing link, anchor, picture or name of the reference is an error."""
    pytest.importorskip("mkdocs", reason="needs the extra [docs]")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    pages = [path.read_text() for path in tmp_path.rglob("*.html")]
    assert len(pages) > len(PAGES)
    for page in pages:
        loaded = re.findall(r'<(?:link|script|img|source)[^>]+(?:href|src|srcset)="([^"]+)"', page)
        assert loaded
        assert not [url for url in loaded if re.match(r"(https?:)?//", url)]
