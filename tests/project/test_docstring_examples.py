"""What docs/api.md shows is everything public, and its examples run on two ranks."""

import os
import tempfile
from pathlib import Path

from distributed import ranks
from docstring_examples import documented, examples, play

import tritonddp
from tritonddp import DistributedDataParallel

WRAPPER = "tritonddp.DistributedDataParallel"
# How an example uses what it does not call by its name.
USED_AS = {"forward": "model(inputs)", "join_hook": "model.join()"}
# These change the process for good, or need a library and a launcher: tests/integrations.
LAUNCHED = ("tritonddp.replace_stock", "tritonddp.integrations.")
NAMES = [name for name in documented() if not name.startswith(LAUNCHED)]


def test_the_reference_has_everything_public() -> None:
    found = set(documented())
    assert {f"tritonddp.{name}" for name in tritonddp.__all__ if name != "__version__"} <= found
    own = {name for name in vars(DistributedDataParallel) if not name.startswith("_")}
    shown = {name.removeprefix(f"{WRAPPER}.") for name in found if name.startswith(f"{WRAPPER}.")}
    of_stock = {"join", "join_hook"}  # in the base with stock's other names
    assert shown == own | of_stock


def test_everything_public_is_in_an_example() -> None:
    code = "\n".join(each for name in NAMES for each in examples(name))
    for name in NAMES:
        last = name.rpartition(".")[2]
        assert USED_AS.get(last, last) in code, f"no example uses {name}"


@ranks(2)
def test_examples_run_on_two_ranks() -> None:
    played, before = [], Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for name in NAMES:
                for code in examples(name):
                    known = play(name, code)
                    assert isinstance(known["model"], DistributedDataParallel)
                    known["model"].check_sync()
                    played.append(name)
        finally:
            os.chdir(before)
    assert len(played) > 12
