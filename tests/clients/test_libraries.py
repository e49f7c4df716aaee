"""Libraries train with tritonddp as with stock DDP: the same bits, in as many collectives.

``play.py`` trains with each library under torchrun: with stock's class, with ours, and in place.
"""

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any, NamedTuple

import launched
import pytest
from launched import ROOT

pytestmark = pytest.mark.clients


class Library(NamedTuple):
    """A row of the table.

    Attributes:
        packages: the packages that are required.
        in_place: users of the library replicate the module in place themselves.
        saved: how many fewer collectives a step needs than with stock DDP. Stock sends the buffers
            of a BatchNorm in two messages, one for each dtype; tritonddp sends them through the
            memory of the host. With the Trainer of transformers, stock looks for unused
            parameters, which takes another collective.
    """

    packages: str
    in_place: bool = False
    saved: int = 0


LIBRARIES = {
    "accelerate": Library("accelerate", saved=2),
    "fabric": Library("lightning", saved=2),
    "fastai": Library("fastai accelerate", saved=2),
    "ignite": Library("ignite", in_place=True, saved=2),
    # Runner does not synchronize buffers.
    "mmengine": Library("mmengine", in_place=True),
    "open_clip": Library("open_clip torchvision", saved=1),
    "peft": Library("peft transformers", saved=1),
    "sentence_transformers": Library("sentence_transformers datasets"),
    "timm": Library("timm torchvision", in_place=True),
    "torchao": Library("torchao", in_place=True),
    "torchft": Library("torchft", in_place=True),
    "transformers": Library("transformers accelerate"),
    "transformers_compiled": Library("transformers accelerate", saved=1),
    "trl": Library("trl"),
}


def skip_without(packages: str) -> None:
    for package in packages.split():
        try:
            if importlib.util.find_spec(package) is None or package == "torchvision":
                importlib.import_module(package)
        except (ImportError, RuntimeError) as error:  # torchvision may belong to another torch
            pytest.skip(f"{error}: see the extra [clients] in pyproject.toml")


@functools.cache
def report(script: str, *words: str, nproc: int | None = 2) -> dict[str, Any]:
    env = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = launched.run(Path(__file__).with_name(script), *words, env=env, nproc=nproc)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')][-1]


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_ends_with_the_bits_of_stock_and_sends_no_more(name: str) -> None:
    skip_without(LIBRARIES[name].packages)
    stock, ours = (report("play.py", name, ddp) for ddp in ("stock", "triton"))
    assert ours["is stock's"]
    compare(name, stock, ours)


@pytest.mark.parametrize("name", [name for name in LIBRARIES if LIBRARIES[name].in_place])
def test_a_library_that_trains_in_place_ends_with_the_bits_of_stock(name: str) -> None:
    skip_without(LIBRARIES[name].packages)
    stock, ours = (report("play.py", name, ddp) for ddp in ("stock", "in_place"))
    assert ours["in place"]
    # Buffers are sent to the other ranks after a backward, with stock before the next forward.
    (_, first), *_ = stock["bits"]
    expected = [
        [params, first if mine[1] == first else buffers]
        for mine, (params, buffers) in zip(ours["bits"], stock["bits"], strict=True)
    ]
    compare(name, {**stock, "bits": expected}, ours)


def compare(name: str, stock: dict[str, Any], ours: dict[str, Any]) -> None:
    assert (stock["wrapped by"], ours["wrapped by"]) == ("torch", "tritonddp")
    assert ours["same on all ranks"]
    less = [a - b for a, b in zip(stock["collectives"], ours["collectives"], strict=True)]
    # After a forward in no_sync() no buffers are sent.
    assert max(less) == LIBRARIES[name].saved, (stock["collectives"], ours["collectives"])
    assert min(less) >= 0
    # Only MMEngine's Runner passes False, see docs/frameworks.md.
    assert (ours["find_unused_parameters"] is False) == (name == "mmengine")
    for what in {*stock} - {"wrapped by", "collectives", "find_unused_parameters"}:
        assert ours[what] == stock[what], what


@pytest.mark.parametrize("words", [("by_hand",), ("hook", "killed")])
def test_ray_train_ends_with_the_bits_of_stock_also_after_a_killed_worker(words: Any) -> None:
    skip_without("ray pandas")
    stock, ours = (report("ray_train.py", *each, nproc=None) for each in (("stock",), words))
    assert [rank["bits"] for rank in ours["ranks"]] == [rank["bits"] for rank in stock["ranks"]]
    classes = [{rank["wrapped by"] for rank in each["ranks"]} for each in (stock, ours)]
    assert classes == [{"torch.nn.parallel.distributed"}, {"tritonddp.wrapper"}]
    assert {len(attempts) for attempts in ours["attempts"]} == {len(words)}
    assert {attempts[0] for attempts in ours["attempts"]} == {"0"}
