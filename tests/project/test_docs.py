"""The pages name tests and pages that exist, every case, and what stock is tested to do."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from differential.named import PROGRAMS
from launched import ROOT

PAGES = [
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")),
    ROOT / "tests" / "differential" / "named" / "README.md",
]
PAGE = PAGES[-1].read_text()
LINKING = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
README_LINES = 120  # what a newcomer reads to the end
ACTIONS = "../../actions/workflows/"
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")
FILE = re.compile(r"`((?:tests|examples|benchmarks|tritonddp)/[\w/]+(?:\.py)?)[` ]")
ROW = re.compile(r"^\| (.*) \| ([^|]*) \| ([^|]*) \| `(\w+)` \|$", re.MULTILINE)


def functions(path: Path) -> set[str]:
    return {
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    }


def test_every_test_that_a_page_names_exists() -> None:
    assert "::test_" in PAGE
    for page in PAGES:
        for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
            assert name.startswith("test_"), f"{path}::{name} is not run by itself"
            assert name in functions(ROOT / path), f"{page.name} names {path}::{name}"


def test_the_page_has_every_case_once_with_what_stock_does() -> None:
    rows = {name: (default, flagged) for _, default, flagged, name in ROW.findall(PAGE)}
    assert len(ROW.findall(PAGE)) == len(rows)
    assert rows == {name: each.stock for name, each in PROGRAMS.items() if each.stock}


def test_the_page_of_differences_counts_the_cases_of_each_kind() -> None:
    counted = {}
    for section in PAGE.split("\n## "):
        if rows := ROW.findall(section):
            right = [sum(row[column] == "right" for row in rows) for column in (1, 2)]
            (anchor,) = slugs("# " + section.partition("\n")[0])
            counted[anchor] = (len(rows), *right)
    page = (ROOT / "docs" / "differences.md").read_text()
    row = r"^\| \[[^]]+\]\(\S+?#(\S+)\) \| (\d+) \| (\d+) \| (\d+) \|"
    said = {anchor: (*map(int, of),) for anchor, *of in re.findall(row, page, re.MULTILINE)}
    assert len(said) == 11
    assert said == counted


def test_the_page_of_frameworks_has_a_row_for_every_library_that_is_tested() -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text().lower()
    tables = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| "))
    letters = re.sub(r"[^a-z0-9\n]", "", tables)
    for script in (ROOT / "tests" / "clients").glob("with_*.py"):
        assert script.stem.removeprefix("with_").replace("_", "") in letters, script.name


def test_every_file_that_a_page_names_exists() -> None:
    named = [(page.name, path) for page in PAGES for path in FILE.findall(page.read_text())]
    assert len([path for name, path in named if name == "frameworks.md"]) >= 5
    for name, path in named:
        assert (ROOT / path).exists(), f"{name} names {path}"


def test_every_file_that_the_picture_of_the_rooms_names_exists() -> None:
    found = {path.stem for path in (ROOT / "tritonddp").rglob("*")}
    for shade in ("light", "dark"):
        picture = (ROOT / "docs" / f"architecture-{shade}.svg").read_text()
        lines = re.findall(r'class="files".*?>(.*)</text>', picture)
        named = re.findall(r"\w+", re.sub("<.*?>", "", " ".join(lines)))
        assert len(named) > 60
        assert set(named) <= found


def test_every_call_in_the_life_of_a_backward_is_in_its_file() -> None:
    page = (ROOT / "docs" / "one-backward.md").read_text()
    calls = re.findall(r"^ [^.\n]*?(\w+)\.(\w+).* (\w+\.py)$", page, re.MULTILINE)
    assert len(calls) > 20
    for owner, call, file in calls:
        (path,) = (ROOT / "tritonddp").rglob(file)
        assert re.search(rf"(def |self\.){call}\b", path.read_text()), f"{owner}.{call} in {file}"


def test_every_link_of_a_page_leads_to_a_file_and_to_a_heading_in_it() -> None:
    links = [(page, *link) for page in LINKING for link in LINK.findall(page.read_text())]
    assert len(links) > 20
    for page, path, anchor in links:
        target = (page.parent / path).resolve() if path else page
        if page.parent == ROOT and path.startswith(ACTIONS):  # on GitHub, of whatever repository
            workflow = path.removeprefix(ACTIONS).removesuffix("/badge.svg")
            target = ROOT / ".github" / "workflows" / workflow
        assert target.exists(), f"{page.name} links to {path}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {path}#{anchor}"


def anchors(page: Path) -> set[str]:
    return slugs(page.read_text())


def slugs(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a text."""
    code = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", code.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_a_page_and_leads_to_all_others() -> None:
    readme = ROOT / "README.md"
    assert len(readme.read_text().splitlines()) <= README_LINES
    found, ahead = set(), [readme]
    while ahead:
        page = ahead.pop()
        if page not in found and page.suffix == ".md":
            found.add(page)
            links = (path for path, _ in LINK.findall(page.read_text()) if path)
            ahead += [(page.parent / path).resolve() for path in links]
    assert ROOT / "docs" / "index.md" in found
    assert set(PAGES) <= found, "no link leads there"


def test_the_site_has_every_page_in_its_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    named = re.findall(r"^ +- [^#\n]+: (\S+\.md)$", navigation, re.MULTILINE)
    assert len(named) == len(set(named))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= set(named)


@pytest.mark.long
def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Strictly: a link, an anchor, a picture or a name of the reference that is missing fails."""
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
