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
NEEDED = {
    "lightning": ["lightning", "pytorch_lightning"],  # one of them
    "transformers": ["transformers"],
}


def skip_without(*packages: str) -> None:
    for package in packages:
        names = NEEDED.get(package, [package])
        if not any(importlib.util.find_spec(name) for name in names):
            pytest.skip(f"needs {package}: the extra [integrations]")


def output(script: str, *words: str | Path) -> str:
    done = launched.run(ROOT / script, *words, env=ENV)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "packages", "steps", "below"),
    [
        ("zero.py", (), "30", 1.0),
        ("lightning_trainer.py", ("lightning",), "30", 1.0),
        # The Trainer of transformers wraps by Accelerate too.
        pytest.param("accelerate_script.py", ("accelerate",), "20", 1.0, marks=THOROUGH),
        ("huggingface_trainer.py", ("transformers", "accelerate"), "16", 3.43),
    ],
)
def test_an_example_ends_where_it_ends_with_stock(
    example: str, packages: tuple[str, ...], steps: str, below: float
) -> None:
    skip_without("sklearn", *packages)
    shown = output(f"examples/{example}", "--steps", steps)
    rows = re.findall(r"^(\S.*?):? {2,}(\S+) +(\S+)$", shown, re.MULTILINE)
    table = {label: cells for label, *cells in rows}
    assert table["wrapped by"] == ["torch", "tritonddp"]
    assert table["bit-identical on all 2 ranks"] == ["yes", "yes"]
    (losses,) = [cells for label, cells in table.items() if label.startswith("held-out loss")]
    assert losses[0] == losses[1]
    assert float(losses[1]) < below  # the loss of a model that knows only the frequencies
    assert "largest difference of the final parameters, stock to triton: 0\n" in shown
    if example == "zero.py":
        line = r"^bytes of optimizer state: rank 0 (\d+), rank 1 (\d+); with plain AdamW each rank "
        found = re.findall(rf"{line}(\d+)$", shown, re.MULTILINE)
        assert len(found) == 2  # torch's class and tritonddp's
        for first, second, whole in (map(int, each) for each in found):
            assert first + second == whole
            assert max(first, second) < 0.7 * whole  # one convolution has 63 % of all elements


@pytest.mark.long
@pytest.mark.parametrize("trainer", NEEDED)
def test_all_ranks_save_and_stop_and_the_next_run_resumes(trainer: str, tmp_path: Path) -> None:
    skip_without(trainer)
    shown = output("tests/integrations/stop_callbacks.py", trainer, tmp_path)
    # Lines of two ranks may end up in one.
    found = [json.loads(each) for each in re.findall(r'\{"stopped".*?\}', shown)]
    completed = STRUCK + 1
    assert found == [{"stopped": completed, "resumed": completed, "ended": STEPS}] * 2


@pytest.mark.parametrize("model", [3, None])
def test_a_model_that_is_not_wrapped_is_named(model: Any) -> None:
    with pytest.raises(TypeError, match=rf"has a builtins\.{type(model).__name__}: use an adapter"):
        should_stop(model)


class Accelerator:
    """As Accelerate's: it looks the class up when it wraps."""

    def __init__(self) -> None:
        self._models: list[Any] = []

    def prepare_model(self, model: Any, *, fail: bool = False) -> Any:
        if fail:
            raise RuntimeError("no such device")
        return torch.nn.parallel.DistributedDataParallel


def test_an_accelerator_finds_our_class_and_no_other_does() -> None:
    stock = torch.nn.parallel.DistributedDataParallel
    accelerator, other = Accelerator(), Accelerator()
    assert use_tritonddp(accelerator) is accelerator
    assert accelerator.prepare_model(None) is DistributedDataParallel
    assert other.prepare_model(None) is stock
    with pytest.raises(RuntimeError, match="no such device"):
        accelerator.prepare_model(None, fail=True)
    assert torch.nn.parallel.DistributedDataParallel is stock


def test_an_object_that_is_not_a_fresh_accelerator_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got Linear. A Trainer of transformers holds one in \."):
        use_tritonddp(torch.nn.Linear(1, 1))
    accelerator = Accelerator()
    stock = torch.nn.parallel.DistributedDataParallel
    accelerator._models.append(stock.__new__(stock))
    with pytest.raises(RuntimeError, match=r"call use_tritonddp\(\) before prepare\(\)"):
        use_tritonddp(accelerator)


@pytest.mark.parametrize(
    ("library", "modules", "text"),
    [
        ("lightning", "lightning lightning.pytorch pytorch_lightning", "lightning"),
        (
            "fabric",
            "lightning lightning.fabric lightning_fabric",
            r"lightning \(or lightning-fabric",
        ),
        ("transformers", "transformers", "transformers"),
    ],
)
@pytest.mark.quick
def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, library: str, modules: str, text: str
) -> None:
    imported = [name for name in sys.modules if "lightning" in name.partition(".")[0]]
    for name in (*modules.split(), *imported):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"tritonddp.integrations.{library}", raising=False)
    with pytest.raises(ImportError, match=f"pip install {text}"):
        importlib.import_module(f"tritonddp.integrations.{library}")


def test_a_missing_dependency_of_an_installed_library_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "lightning_fabric" / "strategies"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("import packaging_of_lightning")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("lightning_fabric")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError, match="packaging_of_lightning"):
        lightning_class("user", "strategies.DDPStrategy", "lightning_fabric")
