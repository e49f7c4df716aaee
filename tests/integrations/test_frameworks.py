"""Frameworks train with tritonddp on two processes, and end where they end with stock DDP."""

import importlib.util
import re
import sys
from typing import Any

import launched
import pytest
import torch
from launched import ROOT

from tritonddp import DistributedDataParallel
from tritonddp.integrations.accelerate import use_tritonddp


def is_installed(*names: str) -> bool:
    return any(importlib.util.find_spec(name) is not None for name in names)


def needs(package: str, *others: str) -> Any:
    missing = not is_installed(package, *others)
    return pytest.mark.skipif(missing, reason=f"needs {package}: the extra [integrations]")


def run(example: str, *arguments: str) -> dict[str, list[str]]:
    """The table that the example prints on two processes: the cells of each line."""
    done = launched.run(
        ROOT / "examples" / example,
        *arguments,
        env={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    lines = re.findall(r"^(\S.*?):? {2,}(\S+) +(\S+)$", done.stdout, re.MULTILINE)
    return {label: cells for label, *cells in lines} | {"": done.stdout.splitlines()}


def check(table: dict[str, list[str]], below: float) -> None:
    assert table["wrapped by"] == ["torch", "tritonddp"]
    assert table["bit-identical on all 2 ranks"] == ["yes", "yes"]
    (losses,) = [cells for label, cells in table.items() if label.startswith("held-out loss")]
    assert losses[0] == losses[1]
    assert float(losses[1]) < below  # one that knows the frequencies alone has more
    assert "largest difference of the final parameters, stock to triton: 0" in table[""]


@pytest.mark.long
@needs("sklearn")
def test_zero_redundancy_optimizer_shares_its_state_and_goes_on_from_a_checkpoint() -> None:
    table = run("zero.py", "--steps", "30")
    check(table, below=1.0)
    found = re.findall(
        r"^bytes of optimizer state: rank 0 (\d+), rank 1 (\d+); with plain AdamW each rank (\d+)$",
        "\n".join(table[""]),
        re.MULTILINE,
    )
    assert len(found) == 2  # torch's class and tritonddp's
    for first, second, whole in (map(int, each) for each in found):
        assert first + second == whole
        assert max(first, second) < 0.7 * whole  # one convolution has 63 % of all elements


@pytest.mark.long
@needs("lightning", "pytorch_lightning")
@needs("sklearn")
def test_lightning_trainer() -> None:
    check(run("lightning_trainer.py", "--steps", "30"), below=1.0)


@pytest.mark.thorough  # the Trainer of transformers wraps by Accelerate too
@needs("accelerate")
@needs("sklearn")
def test_accelerate_script() -> None:
    check(run("accelerate_script.py", "--steps", "20"), below=1.0)


@pytest.mark.long
@needs("transformers")
@needs("accelerate")
def test_hugging_face_trainer() -> None:
    check(run("huggingface_trainer.py", "--steps", "16"), below=3.43)


class Accelerator:
    """As Accelerate's: it looks the class up when it wraps."""

    def __init__(self) -> None:
        self._models: list[Any] = []

    def prepare_model(self, model: Any, *, fail: bool = False) -> Any:
        if fail:
            raise RuntimeError("no such device")
        return torch.nn.parallel.DistributedDataParallel


def test_an_accelerator_finds_our_class_and_nobody_else_does() -> None:
    stock = torch.nn.parallel.DistributedDataParallel
    accelerator, other = Accelerator(), Accelerator()
    assert use_tritonddp(accelerator) is accelerator
    assert accelerator.prepare_model(None) is DistributedDataParallel
    assert other.prepare_model(None) is stock
    with pytest.raises(RuntimeError, match="no such device"):
        accelerator.prepare_model(None, fail=True)
    assert torch.nn.parallel.DistributedDataParallel is stock


def test_what_is_no_accelerator_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got Linear; a Trainer of transformers has one as its \."):
        use_tritonddp(torch.nn.Linear(1, 1))


def test_an_accelerator_that_has_wrapped_a_model_is_refused() -> None:
    accelerator = Accelerator()
    stock = torch.nn.parallel.DistributedDataParallel
    accelerator._models.append(stock.__new__(stock))
    with pytest.raises(RuntimeError, match=r"call use_tritonddp\(\) before prepare\(\)"):
        use_tritonddp(accelerator)


# The modules that each integration needs, and what the error says where they are missing.
MISSING = {
    "lightning": (("lightning", "lightning.pytorch", "pytorch_lightning"), "lightning"),
    "fabric": (
        ("lightning", "lightning.fabric", "lightning_fabric"),
        r"lightning \(or lightning-fabric\)",
    ),
    "transformers": (("transformers",), "transformers"),
}


@pytest.mark.parametrize("library", MISSING)
@pytest.mark.quick
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    names, said = MISSING[library]
    imported = [name for name in sys.modules if "lightning" in name.partition(".")[0]]
    for name in (*names, *imported):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"tritonddp.integrations.{library}", raising=False)
    with pytest.raises(ImportError, match=f"pip install {said}"):
        importlib.import_module(f"tritonddp.integrations.{library}")
