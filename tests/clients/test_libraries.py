"""Libraries train with tritonddp as with stock DDP: the same bits, in as many collectives.

Each script ``with_*.py`` is run under torchrun with stock's class, with ours, and in place.
"""

import functools
import importlib.util
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launched
import pytest
from launched import ROOT

pytestmark = pytest.mark.clients

TIMEOUT = 120


@dataclass(frozen=True)
class Library:
    """A row of the table.

    Attributes:
        saved: collectives that a step needs less than with stock: where the buffers of a BatchNorm
            are sent, stock sends two messages, one for each dtype, and tritonddp none: they go
            through the memory of the host. Trainer of transformers has stock look for unused
            parameters, which takes one more.
    """

    packages: tuple[str, ...]  # what has to be installed
    unused: bool = True  # whether a parameter that nothing uses is found without an option
    in_place: bool = False  # whether it leaves it to its users to replicate the module in place
    saved: int = 0


LIBRARIES = {
    "accelerate": Library(("accelerate",), saved=2),
    "fabric": Library(("lightning",), saved=2),
    "fastai": Library(("fastai", "accelerate"), saved=2),
    "ignite": Library(("ignite",), in_place=True, saved=2),
    "lightning": Library(("lightning", "torchmetrics"), saved=2),
    "mace": Library(("mace",), saved=4),
    # Runner says find_unused_parameters=False. All of a model's buffers stay where they are.
    "mmengine": Library(("mmengine",), unused=False, in_place=True),
    "opacus": Library(("opacus",)),
    "open_clip": Library(("open_clip", "torchvision"), saved=1),
    "peft": Library(("peft", "transformers"), saved=1),
    "pytorch_metric_learning": Library(("pytorch_metric_learning",), saved=2),
    "sentence_transformers": Library(("sentence_transformers", "datasets")),
    "timm": Library(("timm", "torchvision"), in_place=True),
    "torchao": Library(("torchao",), in_place=True),
    "torchft": Library(("torchft",), in_place=True),
    "torchmetrics": Library(("torchmetrics",), in_place=True, saved=2),
    "transformers": Library(("transformers", "accelerate")),
    "transformers_compiled": Library(("transformers", "accelerate"), saved=1),
    "trl": Library(("trl",)),
}
every_library = pytest.mark.parametrize("name", sorted(LIBRARIES))


def why_missing(*packages: str) -> str | None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            return f"needs {package}: see the extra [clients] in pyproject.toml"
        if package == "torchvision":
            try:
                importlib.import_module(package)
            except (ImportError, RuntimeError) as error:  # it was built for another torch
                return f"torchvision cannot be imported: {error}"
    return None


def start(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    if (missing := why_missing(*LIBRARIES[name].packages)) is not None:
        pytest.skip(missing)
    return launched.run(
        ROOT / "tests" / "clients" / f"with_{name}.py",
        *arguments,
        env={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        timeout=TIMEOUT,
    )


@functools.cache
def report(name: str, ddp: str) -> dict[str, Any]:
    done = start(name, "--ddp", ddp)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


@every_library
def test_a_library_ends_with_stocks_bits_and_sends_no_more(name: str) -> None:
    stock, ours = report(name, "stock"), report(name, "triton")
    assert ours["is stock's"]
    compare(name, stock, ours)


@pytest.mark.parametrize("name", sorted(name for name in LIBRARIES if LIBRARIES[name].in_place))
def test_a_library_that_trains_in_place_ends_with_stocks_bits_too(name: str) -> None:
    stock, ours = report(name, "stock"), report(name, "in_place")
    assert ours["in place"]
    # Buffers come to the other ranks after a backward, with stock before the next forward.
    (_, first), *_ = stock["bits"]
    as_there = [
        [params, first if mine[1] == first else buffers]
        for mine, (params, buffers) in zip(ours["bits"], stock["bits"], strict=True)
    ]
    compare(name, {**stock, "bits": as_there}, ours)


def compare(name: str, stock: dict[str, Any], ours: dict[str, Any]) -> None:
    print(f"{name}: {stock['ms']} ms a step with stock, {ours['ms']} ms with tritonddp")
    assert (stock["wrapped by"], ours["wrapped by"]) == ("torch", "tritonddp")
    assert ours["same on all ranks"]
    less = [a - b for a, b in zip(stock["collectives"], ours["collectives"], strict=True)]
    # Not in each step: no buffers are sent where the forward before was under no_sync.
    assert max(less) == LIBRARIES[name].saved, (stock["collectives"], ours["collectives"])
    assert min(less) >= 0
    others = {"model", "wrapped by", "collectives", "ms", "find_unused_parameters"}
    for what in {*stock} - others:
        assert ours[what] == stock[what], what


@every_library
def test_unused_parameters_need_no_option_but_where_the_page_says_so(name: str) -> None:
    """docs/frameworks.md says which libraries switch the search for them off by themselves."""
    done = start(name, "--ddp", "triton", "--unused")
    if LIBRARIES[name].unused:
        assert done.returncode == 0, done.stderr[-6000:]
        assert json.loads(done.stdout.splitlines()[-1])["same on all ranks"]
    else:
        assert done.returncode != 0
        assert "find_unused_parameters=False makes this an error" in done.stderr


def test_every_script_is_run() -> None:
    scripts = {path.stem for path in Path(__file__).parent.glob("with_*.py")}
    assert scripts == {f"with_{name}" for name in LIBRARIES}


def test_a_lora_on_quantized_weights_of_torchao() -> None:
    """Stock DDP cannot wrap these: they are compared, and sent, by the tensors they are made of."""
    if (missing := why_missing("torchao")) is not None:
        pytest.skip(missing)
    script = ROOT / "tests" / "clients" / "lora_on_torchao.py"
    done = launched.run(script, env={"PYTHONPATH": str(ROOT)}, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-6000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["kind"] for row in rows] == ["int8", "int8", "nf4", "nf4"]
    for row in rows:
        assert row["same before, after wrapping, at the end"] == [False, True, True]
        assert row["learns"]
        assert row["loaded"]


@functools.cache
def in_ray(ddp: str, *, killed: bool = False) -> dict[str, Any]:
    """What ``ray_train.py`` has printed."""
    done = launched.run(
        ROOT / "tests" / "clients" / "ray_train.py",
        *("--ddp", ddp, *(["--killed"] if killed else [])),
        nproc=None,
        env={"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
        timeout=2 * TIMEOUT,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("ddp", "killed"), [("by_hand", False), ("hook", True)])
def test_ray_train_ends_with_stocks_bits_also_after_a_killed_worker(ddp: str, killed: bool) -> None:
    if (missing := why_missing("ray", "pandas")) is not None:
        pytest.skip(missing)
    stock, ours = in_ray("stock"), in_ray(ddp, killed=killed)
    assert [rank["bits"] for rank in ours["ranks"]] == [rank["bits"] for rank in stock["ranks"]]
    classes = [{rank["wrapped by"] for rank in each["ranks"]} for each in (stock, ours)]
    assert classes == [{"torch.nn.parallel.distributed"}, {"tritonddp.wrapper"}]
    assert {len(attempts) for attempts in ours["attempts"]} == {1 + killed}
    assert {attempts[0] for attempts in ours["attempts"]} == {"0"}
