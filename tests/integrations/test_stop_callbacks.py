"""Trainers stop on all ranks after the same step, by callbacks of ours, and go on from there."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import launched
import pytest
from launched import ROOT
from stop_callbacks import STEPS, STRUCK

from tritonddp.integrations.signals import should_stop

NEEDED = {"lightning": ("lightning", "pytorch_lightning"), "transformers": ("transformers",)}


@pytest.mark.long
@pytest.mark.parametrize("trainer", NEEDED)
def test_all_ranks_save_and_end_and_the_next_run_goes_on_behind(
    trainer: str, tmp_path: Path
) -> None:
    if not any(importlib.util.find_spec(name) for name in NEEDED[trainer]):
        pytest.skip(f"needs {trainer}: the extra [integrations]")
    done = launched.run(
        ROOT / "tests" / "integrations" / "stop_callbacks.py",
        *(trainer, tmp_path),
        env={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    # (Lines of two ranks may end up in one.)
    found = [json.loads(each) for each in re.findall(r'\{"stopped".*?\}', done.stdout)]
    stopped = STRUCK + 1  # steps that are done
    assert found == [{"stopped": stopped, "resumed": stopped, "ended": STEPS}] * 2


@pytest.mark.parametrize("model", [3, None])
def test_what_is_not_wrapped_is_named(model: Any) -> None:
    with pytest.raises(TypeError, match=rf"has a builtins\.{type(model).__name__}: use an adapter"):
        should_stop(model)
