"""How a command reaches the processes of a script, and what it does in each of them.

``environment`` makes the variables with which the script is started; ``injected/sitecustomize.py``,
which they bring into every Python process below, calls ``act`` as soon as torch has been imported.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tritonddp
from tritonddp.state import DDPState

FOLDER = Path(__file__).parent / "injected"
VARIABLE = "TRITONDDP_SESSION"
RUN, COMPARE = "run", "compare"


def environment(command: str, **session: Any) -> dict[str, str]:
    """The variables to add to a script's environment.

    Args:
        command: ``RUN`` or ``COMPARE``.
        session: what :func:`act` has to know there; JSON.
    """
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    package = str(Path(tritonddp.__file__).parent)
    content = {"command": command, "prefix": sys.prefix, "package": package, **session}
    return {"PYTHONPATH": path, VARIABLE: json.dumps(content)}


def act(session: Mapping[str, Any]) -> None:
    """Do in this process what the command is for: torch is there, the script has not begun."""
    if session["command"] == RUN:
        tritonddp.replace_stock()
        _note_wrapped(Path(session["folder"]))
    elif "RANK" in os.environ:  # not in the launcher, which imports torch as well
        from tritonddp.cli.comparison.recorder import Recorder

        Recorder(session).install()


def wrapped_models(folder: Path) -> list[int]:
    """How many models each process has wrapped that has wrapped any."""
    return [int(path.read_text() or 0) for path in folder.iterdir()]


def _note_wrapped(folder: Path) -> None:
    """Write down how many models this process wraps, at each: it may end without notice."""
    kind: Any = tritonddp.DistributedDataParallel
    construct = kind.__init__

    @functools.wraps(construct)
    def construct_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        # The launcher may be gone, or its disk full: nothing that the script should hear of.
        with suppress(OSError):
            (folder / str(os.getpid())).write_text(str(DDPState.wrapped))

    kind.__init__ = construct_and_note
