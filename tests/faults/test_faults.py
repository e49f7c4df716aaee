"""Each fault ends in bounded time, with errors that name rank and place, and no wrong gradient."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import launched
import pytest

from faults.table import FAULTS, Fault
from faults.verdict import Result, complaints

PLAYER = Path(__file__).with_name("player.py")
PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("failures.md", "ranks-differ.md")]
LIMIT = 560  # seconds for all faults of a run


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder with the results of all faults that this run has selected, played concurrently."""
    items = [item for item in request.session.items if item.path == request.path]
    names = {item.callspec.params["fault"].name for item in items if hasattr(item, "callspec")}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        done = launched.run(PLAYER, folder, *names, nproc=None, timeout=LIMIT)
        assert done.returncode == 0, done.stderr
        yield Path(folder)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.name)
def test_fault(fault: Fault, played: Path) -> None:
    result = Result.read(played / fault.name, fault)
    for complaint in complaints(fault, result):
        pytest.fail(complaint, pytrace=False)


def messages() -> list[tuple[str, str]]:
    """The messages on the pages about failures, each with the name of its fault."""
    text = "\n".join(page.read_text() for page in PAGES)
    return re.findall(r"(?s)<!-- fault: (\S+) -->\n```text\n(.*?)\n```", text)


def is_in(message: str, text: str) -> bool:
    """Whether ``text`` contains the lines of ``message``, in this order.

    A line ``...`` matches any number of lines, and ``...`` within a line any text.
    """
    lines = [line.strip().split("...") for line in message.splitlines() if line.strip() != "..."]
    patterns = (".*".join(map(re.escape, parts)) for parts in lines)
    shown = iter(text.splitlines())
    return all(any(re.fullmatch(each, line.strip()) for line in shown) for each in patterns)


@pytest.mark.parametrize(
    ("fault", "message"),
    [pytest.param(FAULTS[name], message, id=name) for name, message in messages()],
)
def test_the_pages_show_the_message_of_a_fault(fault: Fault, message: str, played: Path) -> None:
    result = Result.read(played / fault.name, fault)
    text = "\n".join([*result.errors, result.logs])
    assert is_in(message, text), f"the pages show\n{message}\nbut {fault.name} raises\n{text}"


def test_the_pages_show_messages() -> None:
    assert len(messages()) > 12
