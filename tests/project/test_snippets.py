"""Each Python snippet of the pages, and each example of a docstring, runs unchanged.

A snippet that wraps a module runs again with ``replicate`` in place of the class. At ``...``, the
ranks wait for each other.
"""

import importlib.util
import inspect
import os
import pkgutil
import re
import tempfile
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import gather, ranks
from launched import ROOT, played
from test_public_names import DOCUMENTED
from torch import nn
from training import in_folder

import tritonddp

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_A_GPU = ", device_ids=[local_rank]"


def snippets() -> dict[str, str]:
    """The snippets by page and line."""
    return {
        f"{page.name}:{page.read_text().count(chr(10), 0, match.start()) + 1}": match[1]
        for page in PAGES
        for match in re.finditer(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    }


def is_script(code: str) -> bool:
    """Whether the snippet changes the whole process."""
    code = code.replace('# dist.init_process_group("gloo")', "")
    return "init_process_group(" in code or "replace_stock()" in code


class Net(nn.Sequential):
    """A module with a method."""

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        return self[0](images)


def names(code: str, makes: Any, folder: Path) -> dict[str, Any]:
    """The names that a page assumes. ``makes`` wraps the model, unless ``code`` does."""
    module = Net(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    wraps = re.search(r"\b(DDP|DistributedDataParallel|replicate)\(", code)
    model = module if wraps else makes(module, metrics=True)
    batches = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(3)]
    inputs, targets = batches[0]
    params = list(model.parameters())
    optimizer: Any = torch.optim.SGD(params, lr=0.1)
    loss = nn.functional.cross_entropy(model(inputs), targets)
    if "consolidate_state_dict" in code and not wraps:
        optimizer = tritonddp.ZeroRedundancyOptimizer(params, torch.optim.AdamW)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    known = {"__name__": "__main__", "torch": torch, "nn": nn, "dist": dist}
    known |= {"tritonddp": tritonddp, "DistributedDataParallel": makes}
    known |= {"ZeroRedundancyOptimizer": tritonddp.ZeroRedundancyOptimizer}
    known |= {"module": module, "model": model, "params": params, "optimizer": optimizer}
    known |= {"batches": batches, "loader": batches, "microbatches": batches, "n": len(inputs)}
    known |= {"inputs": inputs, "images": inputs, "targets": targets, "loss": loss}
    known |= {"loss_function": nn.functional.cross_entropy, "step": 1000, "rank": dist.get_rank()}
    known |= {"path": folder / "saved.pt", "folder": folder / "saved", "local_rank": 0}
    return known | dict.fromkeys(("save_checkpoint", "Trainer", "trainer"), mock.Mock())


def play(code: str, place: str, makes: Any) -> None:
    """Run a snippet on this rank, and check that the ranks still have the same parameters."""
    known = names(code, makes, Path(gather(tempfile.mkdtemp())[0]))
    if OF_A_GPU in code:
        with pytest.raises(ValueError, match=r"device_ids \[0\].*omit both arguments"):
            exec(compile(code, place, "exec"), dict(known))
        code = code.replace(OF_A_GPU, "")
    for part in code.split("\n...\n"):
        exec(compile(part, place, "exec"), known)
        dist.barrier()
    if hasattr(known["model"], "check_sync"):
        known["model"].check_sync()


def examples() -> Iterator[tuple[str, str]]:
    """The examples in the docstrings of the API, with the lines that docs/api.md puts first."""
    page = (ROOT / "docs" / "api.md").read_text()
    (beginning,) = re.findall(r"<!-- names of the examples -->\n```python\n(.*?)```", page, re.S)
    # tests/integrations has the examples of adapters, which need a library.
    for name in sorted(each for each in DOCUMENTED if "integrations" not in each):
        obj = pkgutil.resolve_name(name.replace(".", ":", 1))
        text = inspect.cleandoc(obj.__doc__ or "")
        for block in re.findall(r"^Example::\n\n((?:    .*\n?|\n)+)", text, re.MULTILINE):
            yield f"the example of {name}", beginning + inspect.cleandoc(f"\n{block}")


def of_pages() -> Iterator[tuple[str, str, Any]]:
    """Snippets with their places, and the function that makes a model of a module."""
    for place, code in snippets().items():
        library = re.search(r"tritonddp\.integrations\.(\w+)", code)
        if is_script(code) or (library and not importlib.util.find_spec(library[1])):
            continue
        yield place, code, tritonddp.DistributedDataParallel
        if "model.module" not in code:  # which a replicated model does not have
            yield f"{place}, in place", code, tritonddp.replicate
    for place, code in examples():
        if not is_script(code):
            yield place, code, tritonddp.DistributedDataParallel


@ranks(2)
def test_each_snippet_runs_as_it_is_printed() -> None:
    failed, snippets = {}, list(of_pages())
    assert len(snippets) > 60
    compiled = partial(torch.compile, backend="aot_eager")  # in a tenth of the time
    with in_folder(), mock.patch.object(torch, "compile", compiled):
        os.chdir(gather(os.getcwd())[0])  # all ranks read the files that an example writes
        for place, code, makes in snippets:
            with mock.patch.object(tritonddp, "DistributedDataParallel", makes):
                try:
                    play(code, place, makes)
                except Exception:
                    failed[place] = traceback.format_exc(limit=-2)
    assert not failed, "\n".join(f"{place}:\n{error}" for place, error in failed.items())


@pytest.mark.parametrize("place", [name for name, code in snippets().items() if is_script(code)])
def test_a_script_of_a_page_runs_as_it_is_printed(place: str, tmp_path: Path) -> None:
    (tmp_path / "mmengine").mkdir()
    (tmp_path / "mmengine" / "runner.py").write_text("class Runner: ...\n")
    done = played(snippets()[place], tmp_path, nproc=2)
    assert done.returncode == 0, done.stderr
