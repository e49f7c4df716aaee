"""When DEBUG records of the loggers ``tritonddp.*`` are written, and where.

The loggers are Python's. A program that sets the level of the logger ``tritonddp`` to DEBUG gets
the records from the next reduction on. A library should configure no more than that: warnings and
errors reach stderr through Python's handler of last resort, as no ``NullHandler`` is added.

``TORCH_DISTRIBUTED_DEBUG=DETAIL`` sets the level to DEBUG too, unless a level is set. If neither
the logger nor its parents have a handler, it also adds one that writes to stderr, since the handler
of last resort drops records below WARNING.
"""

from __future__ import annotations

import logging

import torch.distributed as dist

_FORMAT = "%(asctime)s %(name)s %(levelname)s: %(message)s"


def enable_debug_logging() -> None:
    """If torch's debug level is DETAIL, write DEBUG records."""
    if dist.get_debug_level() != dist.DebugLevel.DETAIL:
        return
    logger = logging.getLogger("tritonddp")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.DEBUG)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
