"""The examples in the docstrings of what docs/api.md names, and the lines that they begin with.

    torchrun --standalone --nproc-per-node 2 tests/project/docstring_examples.py NAME

runs the example of this name on each rank, and says how many models it has wrapped.
"""

import importlib
import inspect
import os
import pkgutil
import re
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

API = Path(__file__).resolve().parents[2] / "docs" / "api.md"
_BEGINNING = re.compile(r"<!-- names of the examples -->\n```python\n(.*?)```", re.DOTALL)
_EXAMPLE = re.compile(r"^Example::\n\n((?:    .*\n?|\n)+)", re.MULTILINE)


def beginning() -> str:
    """The lines of the page that come before each example."""
    (found,) = _BEGINNING.findall(API.read_text())
    return str(found)


def documented() -> list[str]:
    """The names of what the page shows: classes, their members, functions."""
    found = []
    text = API.read_text()
    for name, members in re.findall(r"^::: (\S+)\n((?: .*\n)*)", text, re.MULTILINE):
        found += [name, *(f"{name}.{each}" for each in re.findall(r"- (\w+)$", members, re.M))]
    return found


def examples(name: str) -> list[str]:
    """Those in the docstring of what has this name, as they stand there."""
    first, _, rest = name.partition(".")
    try:  # what the package has by this name, which may be that of a module too
        obj: Any = attrgetter(rest)(importlib.import_module(first))
    except AttributeError:
        obj = pkgutil.resolve_name(name)
    text = inspect.cleandoc(obj.__doc__ or "")
    return [inspect.cleandoc(f"\n{block}") for block in _EXAMPLE.findall(text)]


def play(name: str, code: str, **names: Any) -> dict[str, Any]:
    """Run an example after the page's first lines; returns all names that are there then."""
    known = {"__name__": "__main__", **names}
    exec(compile(beginning(), str(API), "exec"), known)
    known |= names
    exec(compile(code, f"the example of {name}", "exec"), known)
    return known


def _for_trainers(name: str) -> dict[str, Any]:
    """What the examples of adapters have besides: data, and a model as their library wants it."""
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    made = torch.randn(32, 16), torch.randint(4, (32,))
    loader = DataLoader(TensorDataset(*made), batch_size=4)
    if ".lightning." in name:
        from pytorch_lightning import LightningModule

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(16, 4)

            def training_step(self, batch: Any, _: int) -> Any:
                return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.01)

        return {"loader": loader, "lightning_module": Module()}
    if ".transformers." in name:
        from transformers import Trainer, TrainingArguments

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(16, 4)

            def forward(self, x: Any, labels: Any) -> Any:
                output = self.layer(x)
                return {"loss": nn.functional.cross_entropy(output, labels), "logits": output}

        rows = [{"x": x, "labels": y} for x, y in zip(*made, strict=True)]
        asked = {"use_cpu": True, "max_steps": 4, "report_to": "none", "save_strategy": "no"}
        return {"trainer": Trainer(Model(), TrainingArguments("out", **asked), train_dataset=rows)}
    return {"loader": loader}


if __name__ == "__main__":
    import torch
    import torch.distributed as dist

    from tritonddp.state import DDPState

    torch.set_num_threads(1)
    name = sys.argv[1]
    dist.init_process_group("gloo")
    for code in examples(name):
        names, before = _for_trainers(name), DDPState.wrapped
        play(name, code, **names)
        if os.environ["RANK"] == "0":  # less the wrapper that the page's first lines make
            print(name, DDPState.wrapped - before - 1)
