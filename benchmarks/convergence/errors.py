"""Relative error of averaged gradients, and held-out loss, by wire, of a small language model.

    torchrun --standalone --nproc-per-node 4 benchmarks/convergence/errors.py [--out FILE]

All wires of a seed train together: same initial parameters, batches and schedule. In each step the
local gradients of every wire are also averaged in fp32. The relative error of a wire compares its
averaged gradient with that mean, so wires whose parameters have drifted apart are still measured at
their own parameters. LoongForge#231 defines the measure.

*Two levels* need several ranks on each of several hosts. The ranks of this machine pretend to be on
two hosts: hosts exchange through gloo, ranks of a host through memory. *Everything* also quantizes
one-dimensional parameters and embeddings, for which the package has no option. Runs on the CPU.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, not an installed version
sys.path.append(str(Path(__file__).parents[2] / "examples"))

import torch
import torch.distributed as dist
from tasks import Task, Transformer
from tasks import text as text_task
from torch import Tensor
from train import batch_loss, evaluate, first_difference, shards, warmup_and_cosine

from benchmarks.base import command
from benchmarks.base.command import Output
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.convergence.convergence import compared
from benchmarks.report import wires as tables
from benchmarks.report.table import text
from tritonddp import DistributedDataParallel, Int4, Int8
from tritonddp.buckets.formats import ExactParams
from tritonddp.coordination.host import connect

NAME, STEPS, BATCH, LR = "text", 300, 2, 3e-3
HELD_OUT = 256  # windows of text
MODEL = {"width": 64, "depth": 2, "heads": 4}


def nothing(name: str, param: Tensor) -> bool:
    """Mark a wrapper for :func:`quantizing_everything`, as its ``Int8.exact``."""
    return False


# Arguments of the constructor by wire. All other wires are compared with the first one.
_QUANTIZED: dict[str, Any] = {
    "bf16": {"reduce_dtype": torch.bfloat16},
    "int8": {"compression": Int8()},
    "int8 without feedback": {"compression": Int8(error_feedback=False)},
    "int8 (all parameters)": {"compression": Int8(exact=nothing)},
    "int8 (all parameters), without feedback": {
        "compression": Int8(error_feedback=False, exact=nothing)
    },
    "int4": {"compression": Int4()},
    "int4 without feedback": {"compression": Int4(error_feedback=False)},
}
ONE_LEVEL = {"transport": "process_group"}
WIRES: dict[str, dict[str, Any]] = {
    "fp32": ONE_LEVEL,
    **{wire: ONE_LEVEL | options for wire, options in _QUANTIZED.items()},
    **{f"two levels: {wire}": _QUANTIZED[wire] for wire in list(_QUANTIZED) if wire[:3] == "int"},
}


def on_two_hosts() -> Any:
    """Return a context in which the two halves of the ranks are on different hosts."""
    host = 2 * dist.get_rank() // dist.get_world_size()
    return mock.patch.object(connect, "_host", return_value=f"host {host}")


def quantizing_everything() -> Any:
    """Return a context in which wrappers with ``Int8.exact=nothing`` have no exact parameters."""
    find = ExactParams.find

    def found(self: ExactParams, names: Sequence[str], params: Sequence[Tensor]) -> list[bool]:
        return [False] * len(params) if self._asks is nothing else find(self, names, params)

    return mock.patch.object(ExactParams, "find", found)


@dataclass(frozen=True)
class Found:
    """Results of one wire with one seed."""

    errors: dict[str, float]  # means over steps: of the gradient and of its tensors; of the sum
    loss: float  # final, on held-out data, in nats per character
    sent_bytes: int  # by one rank in the last step
    parameters: int


class Contender:
    """Training with one wire from one seed.

    Attributes:
        local: the last local gradients as one vector, in the order of the parameters.
    """

    def __init__(self, wire: str, seed: int, steps: int, group: dist.ProcessGroup) -> None:
        torch.manual_seed(seed)
        module = Transformer(**MODEL)
        params = list(module.parameters())
        self._sizes = [param.numel() for param in params]
        self.local = torch.zeros(sum(self._sizes))
        for param, row in zip(params, self.local.split(self._sizes), strict=True):
            param.register_hook(partial(self._keep, row))
        self.ddp = DistributedDataParallel(module, process_group=group, **WIRES[wire])
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=LR)
        self.schedule = warmup_and_cosine(self.optimizer, steps)
        self._errors: list[tuple[float, float]] = []
        self._sums = torch.zeros(2, len(self.local))  # sums over the steps: errors, gradients
        self._sent_bytes = 0

    @staticmethod
    def _keep(row: Tensor, grad: Tensor) -> None:
        row.copy_(grad.flatten())

    def backward(self, inputs: Tensor, targets: Tensor) -> None:
        counters = self.ddp.reducer.counters
        sent_before = counters.sent_bytes
        batch_loss(self.ddp.train()(inputs), targets).backward()
        self._sent_bytes = counters.sent_bytes - sent_before

    def compare(self, exact: Tensor) -> None:
        """Compare the averaged gradient with ``exact``, the mean of local gradients in fp32."""
        grads = [param.grad for param in self.ddp.parameters() if param.grad is not None]
        found = torch.cat([grad.flatten() for grad in grads])
        away, norms = (
            torch.stack([part.norm() for part in each.split(self._sizes)])
            for each in (found - exact, exact)
        )
        whole = away.norm() / norms.norm()
        self._errors.append((whole.item(), (away / norms.clamp_min(1e-30)).mean().item()))
        self._sums += torch.stack([found - exact, exact])

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def found(self, task: Task, device: torch.device) -> Found:
        whole, tensors = map(mean, zip(*self._errors, strict=True))
        away, total = (each.norm().item() for each in self._sums)
        errors = {"whole": whole, "tensors": tensors, "sum": away / total}
        loss = evaluate(task, self.ddp, device)[0]
        return Found(errors, loss, self._sent_bytes, len(self.local))


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument("--steps", type=command.positive, default=STEPS)
    parser.add_argument("--wires", nargs="+", choices=WIRES, default=list(WIRES), metavar="WIRE")
    options = parser.parse_args()
    task = text_task()
    held_out = (task.held_out_inputs[:HELD_OUT], task.held_out_targets[:HELD_OUT])
    task = replace(task, held_out_inputs=held_out[0], held_out_targets=held_out[1])
    with process_group("gloo") as ranks, on_two_hosts(), quantizing_everything():
        more = {"world_size": ranks.world_size, "backend": ranks.backend, "seeds": options.seeds}
        output = Output("convergence_errors", options.out, ranks.rank == 0, **more)
        by_seed = []
        for seed in options.seeds:
            by_seed.append(train(task, seed, options.steps, options.wires, ranks))
            losses = {wire: [each[wire].loss for each in by_seed] for wire in options.wires}
            found = {
                "target": task.target,
                "parameters": by_seed[0][options.wires[0]].parameters,
                "steps": options.steps,
                "batch_size": BATCH,
                "optimizer": f"AdamW, {LR:g}",
                "held_out_targets": task.held_out_targets.numel(),
                "sent_bytes": {wire: by_seed[0][wire].sent_bytes for wire in options.wires},
                "errors": {wire: [each[wire].errors for each in by_seed] for wire in options.wires},
                "comparisons": compared(losses),
                "losses": losses,  # by wire and seed
            }
            output.write({"tasks": {NAME: found}})
        output.say(*text(tables.errors(output.only("tasks", NAME))))
        output.end()


def train(
    task: Task, seed: int, steps: int, wires: Sequence[str], ranks: Ranks
) -> dict[str, Found]:
    """Train all wires together.

    Raises:
        RuntimeError: at the end, a parameter differs between ranks.
    """
    # Two levels: connections belong to a group, and are created in its first steps.
    group = dist.new_group()
    contenders = {wire: Contender(wire, seed, steps, group) for wire in wires}
    batches = shards(len(task.inputs), BATCH, ranks.rank, ranks.world_size, seed)
    for indices in itertools.islice(batches, steps):
        for each in contenders.values():
            each.backward(task.inputs[indices], task.targets[indices])
        exact = torch.stack([each.local for each in contenders.values()]) / ranks.world_size
        dist.all_reduce(exact)
        for each, row in zip(contenders.values(), exact, strict=True):
            each.compare(row)
            each.update()
    if difference := first_difference(_parameters(contenders)):
        raise RuntimeError(f"seed {seed}: the ranks do not hold the same bits of {difference}")
    return {wire: each.found(task, ranks.device) for wire, each in contenders.items()}


def _parameters(contenders: dict[str, Contender]) -> Iterator[tuple[str, Tensor]]:
    for wire, each in contenders.items():
        for name, parameter in each.ddp.module.named_parameters():
            yield f"{wire}: {name}", parameter


if __name__ == "__main__":
    main()
