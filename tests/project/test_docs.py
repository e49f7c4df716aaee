"""Tests, files, links and calls that the pages name exist. `make docs` checks the site."""

import re

from differential.named import PROGRAMS
from launched import ROOT

CASES_PAGE = ROOT / "tests" / "differential" / "named" / "README.md"
ROOT_PAGES = [ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")]
PAGES = {page: page.read_text() for page in [*(ROOT / "docs").glob("*.md"), *ROOT_PAGES]}
PAGES[CASES_PAGE] = CASES_PAGE.read_text()
ACTIONS = "../../actions/workflows/"
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")
FILE = re.compile(r"`((?:tests|examples|benchmarks|tritonddp)/[\w/]+(?:\.py)?)[` ]")
ROW = re.compile(r"^\| (.*) \| ([^|]*) \| ([^|]*) \| `(\w+)` \|$", re.MULTILINE)


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
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short_enough_to_read_to_its_end() -> None:
    assert len(PAGES[ROOT / "README.md"].splitlines()) <= 120
