"""How a command reaches the processes of a script, and what it does in each of them.

``environment`` returns the variables with which the script is started. They bring
``injected/sitecustomize.py`` into every Python process of the script, which calls ``act`` as soon
as torch has been imported.
"""

from __future__ import annotations

import atexit
import functools
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from os import _exit as end_process  # public, despite its underscore; skips cleanup
from pathlib import Path
from typing import Any

import tritonddp

FOLDER = Path(__file__).parent / "injected"
VARIABLE = "TRITONDDP_SESSION"
RUN, COMPARE = "run", "compare"
SPAWNS = "spawns.mark"  # a file: the script starts its own ranks
# Maximum number of characters of a script's error to repeat.
_LONGEST = 500


def environment(command: str, **session: Any) -> dict[str, str]:
    """Return the variables to add to a script's environment, with the session for :func:`act`."""
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    package = str(Path(tritonddp.__file__).parent)
    content = {"command": command, "prefix": sys.prefix, "package": package, **session}
    return {"PYTHONPATH": path, VARIABLE: json.dumps(content)}


def act(session: Mapping[str, Any]) -> None:
    """Apply the command in this process, after torch is imported and before the script starts."""
    if session["command"] == RUN:
        tritonddp.replace_stock()
        _note_wrapped(Path(session["folder"]))
        atexit.register(_note_error, Path(session["folder"]))
        _at_spawned_rank((Path(session["folder"]) / SPAWNS).touch)
    elif "RANK" in os.environ or session["spawns"]:  # not in torchrun, which also imports torch
        from tritonddp.cli.comparison.recorder import Recorder

        recorder = Recorder(session)
        recorder.install()
        _at_spawned_rank(recorder.tell_spawned)


def wrapped_models(folder: Path) -> list[int]:
    """Return the number of models that each process has wrapped, without zeros."""
    return [int(path.read_text() or 0) for path in folder.iterdir() if not path.suffix]


def errors(folder: Path) -> list[str]:
    """Return the error of each process that ended with an uncaught exception."""
    return [path.read_text() for path in sorted(folder.glob("*.error"))]


def _at_spawned_rank(act: Callable[[], None]) -> None:
    """Call ``act`` in a rank that the script itself started under torchrun, and end the rank.

    There, ``env://`` refers to torchrun's own store, where such a rank would wait forever.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    join = dist.init_process_group

    @functools.wraps(join)
    def joining(*args: Any, **kwargs: Any) -> Any:
        has_parent = multiprocessing.parent_process() is not None
        if has_parent and dist.is_torchelastic_launched():
            act()
            end_process(0)
        return join(*args, **kwargs)

    dist.init_process_group = distributed_c10d.init_process_group = joining


def _note_wrapped(folder: Path) -> None:
    """Write the number of wrapped models to a file after each, as the process may be killed."""
    from tritonddp.state import DDPState

    kind: Any = tritonddp.DistributedDataParallel
    construct = kind.__init__

    @functools.wraps(construct)
    def construct_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        # The launcher may be gone, or its disk full; the script must not see such errors.
        with suppress(OSError):
            (folder / str(os.getpid())).write_text(str(DDPState.wrapped))

    kind.__init__ = construct_and_note


def _note_error(folder: Path) -> None:
    """At exit, write the exception if Python has printed one and ends because of it."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        text = traceback.format_exception_only(type(error), error)[-1].strip()
        rank = os.environ.get("RANK")
        with suppress(OSError):
            where = "" if rank is None else f"rank {rank}: "
            (folder / f"{os.getpid()}.error").write_text(f"{where}{text[:_LONGEST]}")
