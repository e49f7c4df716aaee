"""Log records, collected for a test."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class Kept(logging.Handler):
    """Keeps all records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def lines(self, name: str = "") -> list[str]:
        return [each.getMessage() for each in self.records if each.name.endswith(name)]


@contextmanager
def logged(level: int, name: str = "tritonddp") -> Iterator[Kept]:
    """Context: collect the records of logger ``name`` and its children, from ``level`` up."""
    logger, handler = logging.getLogger(name), Kept()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
