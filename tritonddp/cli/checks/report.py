"""What a check found, and what to change: text to paste into an issue, or JSON."""

from __future__ import annotations

import getpass
import json
import re
import socket
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

_WIDTH = 100
_NAMES = 24  # columns of the names of facts
# Of other machines. Loopback stays: that gloo has taken it may be what is wrong.
_ADDRESS = re.compile(
    r"\b(?!127\.)(?!0\.0\.0\.0)\d{1,3}(\.\d{1,3}){3}\b|\b[0-9a-f]{1,4}(:+[0-9a-f]{1,4}){3,}\b"
    r"|\b[0-9a-f]{4}(:[0-9a-f]{1,4})*::[0-9a-f]{1,4}(:[0-9a-f]{1,4})*\b"
)


class Severity(IntEnum):
    """How urgent an advice is; the most urgent comes first."""

    BROKEN = 0  # training stops, or does not begin
    SLOW = 1  # it costs time or memory
    NOTE = 2  # it may matter

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Advice:
    """A sentence: what is found, and what to change."""

    severity: Severity
    text: str


@dataclass
class Section:
    """What one check found.

    Attributes:
        title: of what.
        facts: name and value, in the order of the report.
        advice: what to change.
    """

    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)

    def fact(self, name: str, value: object) -> None:
        """Note what was found."""
        self.facts.append((name, str(value)))

    def look(self, name: str, find: Callable[[], object]) -> None:
        """Note what ``find`` returns, nothing if that is ``None``; or why it cannot be known."""
        try:
            value = find()
        except Exception as error:  # a check that fails is a line of the report, whatever it is
            value = f"not known: {type(error).__name__}: {error}"
        if value is not None:
            self.fact(name, value)

    def broken(self, text: str) -> None:
        """Add advice: training stops, or does not begin."""
        self.advice.append(Advice(Severity.BROKEN, text))

    def slow(self, text: str) -> None:
        """Add advice: it costs time or memory."""
        self.advice.append(Advice(Severity.SLOW, text))

    def note(self, text: str) -> None:
        """Add advice: it may matter."""
        self.advice.append(Advice(Severity.NOTE, text))


def checked(title: str, check: Callable[[Section], None]) -> Section:
    """The section that ``check`` fills; if it fails, the section says so."""
    section = Section(title)
    try:
        check(section)
    except Exception as error:
        section.fact("this check failed", f"{type(error).__name__}: {error}")
        section.note(
            f"the check of {title} failed, so this report is not complete: please report it"
        )
    return section


def advice_of(sections: Sequence[Section]) -> list[Advice]:
    """The advice of all sections, the most urgent first, each once."""
    found = dict.fromkeys(each for section in sections for each in section.advice)
    return sorted(found, key=lambda advice: advice.severity)


def exit_code(sections: Sequence[Section]) -> int:
    """0, or 1 if something is broken."""
    return int(any(each.severity is Severity.BROKEN for each in advice_of(sections)))


def as_text(sections: Sequence[Section], shows_names: bool, master_addr: str = "") -> str:
    """The report as text; names of users and hosts are replaced unless ``shows_names``."""
    lines = ["tritonddp doctor"]
    for section in sections:
        lines += ["", section.title]
        for name, value in section.facts:
            # Long names have their value below them.
            lines += _wrapped(f"  {name:{_NAMES}}{value}", " " * (_NAMES + 2))
    lines += ["", "what to change"]
    found = advice_of(sections)
    for number, each in enumerate(found, 1):
        lines += _wrapped(f"  {number}. {each.severity}: {each.text}", " " * 5)
    if not found:
        lines.append("  nothing")
    text = "\n".join(lines)
    return text if shows_names else without_names(text, master_addr)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def as_json(sections: Sequence[Section], shows_names: bool, master_addr: str = "") -> str:
    """The report as JSON: ``sections``, ``advice``, ``exit_code``; names as in :func:`as_text`."""
    content = {
        "sections": {section.title: dict(section.facts) for section in sections},
        "advice": [
            {"severity": str(each.severity), "text": each.text} for each in advice_of(sections)
        ],
        "exit_code": exit_code(sections),
    }
    text = json.dumps(content, indent=1, ensure_ascii=False)
    return text if shows_names else without_names(text, master_addr)


def without_names(text: str, master_addr: str = "") -> str:
    """``text`` without names of the user and of hosts, and without addresses of other machines.

    The hosts are this one and the one at ``master_addr``, if that is a name.
    """
    text = text.replace(str(Path.home()) + "/", "~/")
    host = socket.gethostname()
    names = {host: "host", host.partition(".")[0]: "host"}
    if not re.fullmatch(r"[\d.]*|.*:.*", master_addr):  # an address
        names[master_addr] = "host 0"
    with suppress(KeyError, OSError):  # a container's user may have no name
        names[getpass.getuser()] = "user"
    for name in sorted(names, key=len, reverse=True):
        if name and name not in ("root", "localhost"):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", f"<{names[name]}>", text)
    return _ADDRESS.sub("<address>", text)


def amount(nbytes: float) -> str:
    """A number of bytes, in a unit that fits."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            digits = ".3g" if nbytes < 1000 * size else ".0f"
            return f"{nbytes / size:{digits}} {unit}"
    return f"{nbytes:.0f} bytes"


def duration(seconds: float) -> str:
    """A time, in a unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def rate(bytes_per_second: float) -> str:
    """The speed of a line, in bits per second."""
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
