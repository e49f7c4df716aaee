"""When the records of the loggers ``tritonddp.*`` at level DEBUG come out, and where.

They are Python's: whoever sets the level of the logger ``tritonddp`` to DEBUG gets them, from the
next reduction on. As a library should, this one configures nothing, and it adds no ``NullHandler``
either: warnings and errors (a rank is gone, a backward broke off) reach stderr through Python's
handler of last resort where nobody has configured any.

``TORCH_DISTRIBUTED_DEBUG=DETAIL`` asks for detail too, as clearly as code does, mostly by somebody
who has no code at hand. So it sets the level, unless a level is set; and it adds a handler to
stderr where there is none up to the root, since the one of last resort leaves out what is below
WARNING. Where there is one, its owner has decided where records go.
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
