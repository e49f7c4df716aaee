"""Frameworks train with tritonddp on two processes, stop together, and name what is missing."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import launched
import pytest
import torch
from launched import ROOT
from stop_callbacks import STEPS, STRUCK

from tritonddp import DistributedDataParallel
from tritonddp.integrations.accelerate import use_tritonddp
from tritonddp.integrations.signals import should_stop
from tritonddp.integrations.strategies import lightning_class

THOROUGH = pytest.mark.thorough
ENV = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def skip_without(packages: str) -> None:
    for package in packages.split():
        # Either package of Lightning suffices.
        names = [package] if package != "lightning" else ["lightning", "pytorch_lightning"]
        if not any(map(importlib.util.find_spec, names)):
            pytest.skip(f"needs {package}: the extra [integrations]")


def output(script: str, *words: str | Path) -> str:
    done = launched.run(ROOT / script, *words, env=ENV)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "packages", "steps", "below"),
    [
        ("zero.py", "sklearn", "30", 1.0),
        ("lightning_trainer.py", "sklearn lightning", "30", 1.0),
        # Accelerate wraps for the Trainer of transformers too.
        pytest.param("accelerate_script.py", "sklearn accelerate", "20", 1.0, marks=THOROUGH),
        ("huggingface_trainer.py", "transformers accelerate", "16", 3.43),
    ],
)
def test_an_example_ends_where_it_ends_with_stock(example, packages, steps, below):
    skip_without(packages)
    shown = output(f"examples/{example}", "--steps", steps)
    rows = re.findall(r"^(\S.*?):? {2,}(\S+) +(\S+)$", shown, re.MULTILINE)
    table = {label: cells for label, *cells in rows}
    assert table["wrapped by"] == ["torch", "tritonddp"]
    assert table["bit-identical on all 2 ranks"] == ["yes", "yes"]
    (losses,) = [cells for label, cells in table.items() if label.startswith("held-out loss")]
    assert losses[0] == losses[1]
    assert float(losses[1]) < below  # the loss of a model that knows only the frequencies
    assert "largest difference of the final parameters, stock to triton: 0\n" in shown


@pytest.mark.long
@pytest.mark.parametrize("trainer", ["lightning", "transformers"])
def test_all_ranks_save_and_stop_and_the_next_run_resumes(trainer: str, tmp_path: Path) -> None:
    skip_without(trainer)
    shown = output("tests/integrations/stop_callbacks.py", trainer, tmp_path)
    # Two ranks may print into one line.
    found = [json.loads(each) for each in re.findall(r'\{"stopped".*?\}', shown)]
    completed = STRUCK + 1
    assert found == [{"stopped": completed, "resumed": completed, "ended": STEPS}] * 2


def test_a_model_that_is_not_wrapped_is_named() -> None:
    with pytest.raises(TypeError, match=r"has a builtins\.int: use an adapter"):
        should_stop(3)


class Accelerator:
    """As the class of Accelerate, it looks up torch's class when it wraps."""

    _models: tuple[Any, ...] = ()

    def prepare_model(self, error: Exception | None = None) -> Any:
        if error is not None:
            raise error
        return torch.nn.parallel.DistributedDataParallel


def test_only_a_fresh_accelerator_finds_our_class() -> None:
    stock = torch.nn.parallel.DistributedDataParallel
    accelerator, other = Accelerator(), Accelerator()
    assert use_tritonddp(accelerator) is accelerator
    assert accelerator.prepare_model() is DistributedDataParallel
    assert other.prepare_model() is stock
    with pytest.raises(ZeroDivisionError):
        accelerator.prepare_model(ZeroDivisionError())
    assert torch.nn.parallel.DistributedDataParallel is stock
    other._models = (stock.__new__(stock),)
    with pytest.raises(RuntimeError, match=r"call use_tritonddp\(\) before prepare\(\)"):
        use_tritonddp(other)
    with pytest.raises(TypeError, match=r"got Linear. A Trainer of transformers holds one in \."):
        use_tritonddp(torch.nn.Linear(1, 1))


@pytest.mark.quick
def test_a_missing_library_is_named(monkeypatch):
    imported = [name for name in sys.modules if "lightning" in name.partition(".")[0]]
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning", *imported):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "tritonddp.integrations.lightning", raising=False)
    with pytest.raises(ImportError, match="pip install lightning"):
        importlib.import_module("tritonddp.integrations.lightning")


def test_a_missing_dependency_of_an_installed_library_is_named(monkeypatch, tmp_path):
    package = tmp_path / "lightning_fabric"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "strategies.py").write_text("import packaging_of_lightning")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("lightning_fabric")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError, match="packaging_of_lightning"):
        lightning_class("user", "strategies.DDPStrategy", "lightning_fabric")
