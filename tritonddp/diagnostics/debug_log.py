"""When the records of the loggers ``tritonddp.*`` at level DEBUG come out, and where.

They are Python's: whoever sets the level of the logger ``tritonddp`` to DEBUG gets them, from the
next reduction on. A library configures nothing else; without a ``NullHandler`` warnings and errors
reach stderr through Python's handler of last resort.

``TORCH_DISTRIBUTED_DEBUG=DETAIL`` sets that level too, unless one is set; and it adds a handler to
stderr where there is none up to the root, since the one of last resort leaves out what is below
WARNING.
"""

from __future__ import annotations

import logging

import torch.distributed as dist

_FORMAT = "%(asctime)s %(name)s %(levelname)s: %(message)s"


def enable_debug_logging() -> None:
    """If torch's debug level is DETAIL, have DEBUG records come out."""
    if dist.get_debug_level() != dist.DebugLevel.DETAIL:
        return
    logger = logging.getLogger("tritonddp")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.DEBUG)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
