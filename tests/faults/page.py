"""The messages that the pages about failures show."""

import re
from pathlib import Path

_DOCS = Path(__file__).parents[2] / "docs"
_PAGES = [_DOCS / name for name in ("failures.md", "ranks-differ.md")]
_BLOCK = re.compile(r"<!-- fault: (\S+) -->\n```text\n(.*?)\n```", re.DOTALL)


def messages() -> list[tuple[str, str]]:
    """The name of the fault that has produced it, and each message."""
    return _BLOCK.findall("\n".join(page.read_text() for page in _PAGES))


def is_in(message: str, said: str) -> bool:
    """Whether the lines of ``message`` are in ``said``, one after the other.

    Those that are ``...`` stand for any number of lines, and in a line for any text.
    """
    lines = iter(said.splitlines())
    return all(
        any(re.fullmatch(_pattern(line), each.strip()) for each in lines)
        for line in message.splitlines()
        if line.strip() != "..."
    )


def _pattern(line: str) -> str:
    return ".*".join(map(re.escape, line.strip().split("...")))
