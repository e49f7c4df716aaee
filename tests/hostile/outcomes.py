"""What a program says of itself where its right outcome is not stock's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """A difference that ``docs/differences.md`` names.

    Attributes:
        row: how the row of the page begins: its first cell.
        error: text of the error in which it ends, a regular expression; ``""`` where it ends as
            stock.
        keys: which rows may differ where it ends as stock, a regular expression; one must.
        timeout: of the process group, in seconds, for this class alone: an error within it names
            who waits for whom. ``None`` is the harness's.
    """

    row: str
    error: str = ""
    keys: str = ""
    timeout: float | None = None
