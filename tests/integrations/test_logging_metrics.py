"""Trainers log what ``metrics()`` tells, by callbacks of ours."""

import importlib
import importlib.util
import json
import sys
from typing import Any

import launched
import pytest
from launched import ROOT

from tritonddp._arguments import check_every
from tritonddp.integrations.metrics import numbers_of

NEEDED = {"lightning": ("lightning", "pytorch_lightning"), "transformers": ("transformers",)}
trainers = pytest.mark.parametrize("trainer", NEEDED)


def run(trainer: str, wrapper: str) -> Any:
    if not any(importlib.util.find_spec(name) for name in NEEDED[trainer]):
        pytest.skip(f"needs {trainer}: the extra [integrations]")
    return launched.run(
        ROOT / "tests" / "integrations" / "logging_metrics.py",
        *(trainer, wrapper),
        env={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )


@pytest.mark.long
@pytest.mark.parametrize("wrapper", ["on", pytest.param("in_place", marks=pytest.mark.thorough)])
@trainers
def test_metrics_are_logged_on_rank_0(trainer: str, wrapper: str) -> None:
    done = run(trainer, wrapper)
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [step for step, _ in found["logged"]] == [4, 8, 12]  # of the optimizer
    for step, numbers in found["logged"]:
        numbers.pop("epoch", None)
        assert all(name.startswith("ddp/") for name in numbers)
        assert all(isinstance(value, int | float) for value in numbers.values())
        assert numbers["ddp/step"] == step
        assert numbers["ddp/step_ms"] > 0
        assert {"ddp/forward_ms", "ddp/backward_ms", "ddp/exposed_ms"} < set(numbers)
    if trainer == "transformers":  # whose losses are logged in the same steps
        assert found["losses"] == [4, 8, 12]


@pytest.mark.parametrize(
    ("wrapper", "said"),
    [
        pytest.param("off", "needs metrics=True", marks=pytest.mark.thorough),
        pytest.param("stock", "DistributedDataParallel wraps", marks=pytest.mark.thorough),
    ],
)
@trainers
def test_a_model_without_metrics_is_an_error(trainer: str, wrapper: str, said: str) -> None:
    done = run(trainer, wrapper)
    assert done.returncode != 0
    assert said in done.stderr


def test_what_is_not_wrapped_is_named() -> None:
    with pytest.raises(TypeError, match=r"has a builtins\.int: use an adapter"):
        numbers_of(3)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, None])
def test_a_number_of_steps_is_from_1_on(every: Any) -> None:
    with pytest.raises(ValueError, match="every should be a number of steps from 1 on, got"):
        check_every(every)


def test_missing_transformers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "tritonddp.integrations.transformers", raising=False)
    with pytest.raises(ImportError, match="pip install transformers"):
        importlib.import_module("tritonddp.integrations.transformers")
