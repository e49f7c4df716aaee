"""The process of network.py on each host: one rank that times training steps at several line rates.

    python benchmarks/network/rank.py PLAN      a Plan as JSON; rank 0 adds to its result file

Every rank holds the unwrapped model and all configurations of stock DDP and tritonddp, as in
step.py, and limits its own line. In each round every configuration takes one step, in a newly
shuffled order.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, not an installed version

from benchmarks.base import deadline
from benchmarks.base.command import Output
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.base.results import Result
from benchmarks.models.cases import CASES, Case, features, loss, transformer
from benchmarks.models.configurations import UNWRAPPED
from benchmarks.models.gradients import check
from benchmarks.network.namespaces import CONGESTION_CONTROL, Host, tx_bytes
from benchmarks.network.result import contenders_of, evaluate, families_at
from benchmarks.report import tables
from benchmarks.report.table import text

LEAST_ROUNDS = 2

MODELS = {
    **CASES,
    # 16 tokens: little compute for many gradients
    "transformer_10m": Case(
        "transformer_10m", partial(transformer, 384, heads=6), features(16, 384), (2, 2)
    ),
}


@dataclass(frozen=True)
class Plan:
    """The measurements of a rank.

    Attributes:
        seconds: target duration of the rounds at one rate, after two rounds; shorter if a deadline
            comes first.
    """

    namespace: str  # namespace of the host
    out: str  # the result file
    rates: Sequence[float | None]  # bits per second of every host's line, None for no limit
    models: Sequence[str]  # names in MODELS
    by_wire: bool  # see families_at()
    rounds: int  # maximum number at each rate
    seconds: float
    ranks_per_host: int


class ReadyClock:
    """Records when the gradients of a model become ready."""

    def __init__(self, model: nn.Module) -> None:
        self.times: list[float] = []
        self.order: list[torch.Size] = []
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self._note)

    def restart(self) -> None:
        self.times.clear()
        self.order.clear()

    def _note(self, param: Tensor) -> None:
        self.times.append(time.perf_counter())
        self.order.append(param.shape)


class Contenders:
    """All configurations of one model, after checking their gradients and rebuilding their buckets.

    Attributes:
        facts: ``model``, ``parameters`` (number of elements), ``gradient_bytes`` of each gradient
            in sending order, ``bucket_counts`` (number of gradients in each of our buckets),
            ``gradients`` (comparison of each configuration's gradients with stock's).
        ready: seconds until each gradient was ready, in the same order, if the last step was
            unwrapped.
    """

    def __init__(self, case: Case, ranks: Ranks, by_wire: bool) -> None:
        groups = families_at(None, by_wire)
        configurations = [UNWRAPPED, *contenders_of(groups)]
        self._models = {each.name: each.wrap(case.model(ranks.device)) for each in configurations}
        self._batch = case.batch(ranks.device, seed=1000 + ranks.rank)
        self._ranks = ranks
        alike = ("stock", "ours fp32" if by_wire else "stock views")
        errors = {each.name: each.error for each in configurations}
        agreements = check(self._models, case, ranks, "stock", alike, errors)
        buckets = [bucket.params for bucket in self._models[groups[0].ours.name].reducer.buckets]
        sent = [param for params in buckets for param in params]
        self.facts: dict[str, Any] = {
            "model": case.name,
            "parameters": sum(param.numel() for param in sent),
            "gradient_bytes": [param.numel() * param.element_size() for param in sent],
            "bucket_counts": list(map(len, buckets)),
            "gradients": {name: asdict(each) for name, each in agreements.items()},
        }
        self._clock = ReadyClock(self._models[UNWRAPPED.name])
        self.step(UNWRAPPED.name)
        if self._clock.order != [param.shape for param in sent]:
            raise RuntimeError(
                f"{case.name}: tritonddp's buckets do not hold the gradients in the order in which "
                "those of the unwrapped model become ready, so the line's limit cannot be computed"
            )

    def step(self, name: str) -> float:
        """Return the seconds of a step of this rank: forward, backward and synchronization."""
        model = self._models[name]
        model.zero_grad(set_to_none=True)
        self._clock.restart()
        self._ranks.barrier()
        start = time.perf_counter()
        loss(model, self._batch).backward()
        end = time.perf_counter()
        self.ready = [each - start for each in self._clock.times]
        return end - start

    def sent_bytes(self, name: str) -> int | None:
        """Return tritonddp's count of sent bytes so far; ``None`` for other configurations."""
        counters = getattr(getattr(self._models.get(name), "reducer", None), "counters", None)
        return None if counters is None else counters.sent_bytes


def main() -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    host, path = Host(plan.namespace, ""), Path(plan.out)
    table = tables.network_wire if plan.by_wire else tables.network
    with process_group("gloo") as ranks:
        output = Output("network", path, ranks.rank == 0, congestion_control=CONGESTION_CONTROL)
        results = json.loads(path.read_text())["results"] if path.exists() else []
        left = len(plan.models) * len(plan.rates)
        for model in plan.models:
            host.limit(None)
            contenders = Contenders(MODELS[model], ranks, plan.by_wire)
            for rate in plan.rates:
                host.limit(rate)
                end = min(
                    deadline.until(deadline.deadline(), 1 / left), time.monotonic() + plan.seconds
                )
                samples = measure(contenders, rate, ranks, plan, end)
                left -= 1
                found = ranks.gathered({"rate": rate, **contenders.facts, **samples})
                result = evaluate(found, plan.by_wire, plan.ranks_per_host)
                results.append(result)
                output.write({"results": results})
                shown = Result({"results": [result]})
                output.say("", *text(table(shown)))


def measure(
    contenders: Contenders, rate: float | None, ranks: Ranks, plan: Plan, end: float
) -> dict[str, Any]:
    """Time all contenders at one rate until ``end``.

    Returns:
        For this rank, by contender, in the order of rounds: ``seconds``, and ``tx_bytes``, the
        bytes that this host has sent. ``sent_bytes``: tritonddp's own count for a step.
        ``ready_seconds``: ready times of the gradients in each unwrapped step.
    """
    compared = contenders_of(families_at(rate, plan.by_wire))
    names = [UNWRAPPED.name, *(each.name for each in compared)]
    counted: dict[str, int] = {}
    ready: list[list[float]] = []

    def sample(name: str) -> tuple[float, int]:
        ranks.barrier()
        tx_before, counted_before = tx_bytes(), contenders.sent_bytes(name)
        seconds = contenders.step(name)
        # The data in this rank's sockets leaves before the messages of the barrier.
        ranks.barrier()
        if counted_before is not None:
            counted[name] = contenders.sent_bytes(name) - counted_before
        if name == UNWRAPPED.name:
            ready.append(contenders.ready)
        return seconds, tx_bytes() - tx_before

    contenders.step("stock")  # lets TCP adapt to the rate
    numbers = deadline.rounds(plan.rounds, end, LEAST_ROUNDS, agreed=ranks.agreed)
    ways = {name: partial(sample, name) for name in names}
    samples = deadline.interleaved(ways, numbers, f"{rate}")
    return {
        "seconds": {name: [took for took, _ in found] for name, found in samples.items()},
        "tx_bytes": {name: [sent for _, sent in found] for name, found in samples.items()},
        "sent_bytes": counted,
        "ready_seconds": ready,
    }


if __name__ == "__main__":
    main()
