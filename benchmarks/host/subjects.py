"""Models whose forward and backward cost next to nothing on the device, timed on the host."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as StockDDP

from benchmarks.base import deadline
from benchmarks.models.cases import ManyParameters
from benchmarks.models.configurations import Configuration
from benchmarks.step.traffic import bucket_bytes, sent_in

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = 64  # elements of a parameter
PARAMETERS, PER_BUCKET = 1000, 50
WARMUPS = 5
SETTLED = 11  # steps; both stock and ours time their first 10 steps for their logging data

Key = tuple[str, int]  # configuration and number of buckets


@dataclass(frozen=True)
class Times:
    """The seconds of one backward, and the time at which each mark was passed."""

    backward: float
    marks: list[float]


class Subject:
    """A model of ``count`` vectors, wrapped by ``configuration``.

    Args:
        configuration: the wrapper and its options.
        count: number of parameters, a multiple of ``per_bucket``.
        per_bucket: number of parameters per bucket.
        marks: positions in the order of gradients at which to read the clock, ascending.
    """

    def __init__(
        self, configuration: Configuration, count: int, per_bucket: int, marks: Sequence[int] = ()
    ) -> None:
        self.sends = configuration.wrapper is not None and not configuration.is_idle
        self.bare = ManyParameters(count, SIZE).to(DEVICE)
        self._marks = list(marks)
        self._passed: list[tuple[int, float]] = []
        for mark in marks:  # the gradient of the last parameter is ready first
            param = self.bare.vectors[count - 1 - mark]
            param.register_post_accumulate_grad_hook(partial(self._note, mark))
        self.model: Any = self.bare
        self.expected_bytes: list[int] = []
        if configuration.wrapper is not None:
            cap = per_bucket * SIZE * 4  # reached by the last parameter of a bucket
            self.expected_bytes = [cap] * (count // per_bucket)
            options = {**configuration.options, "bucket_cap_mb": cap / 2**20}
            self.model = replace(configuration, options=options).wrap(self.bare)

    def _note(self, mark: int, _: Tensor) -> None:
        self._passed.append((mark, time.perf_counter()))

    def step(self, x: Tensor, sweep: Tensor) -> Times:
        """Run a forward, and a backward with cold caches and an idle device.

        Raises:
            RuntimeError: marks were not passed in the expected order.
        """
        self.model.zero_grad(set_to_none=True)
        output = self.model(x)
        sweep.mul_(1.0)  # evicts the host's caches, as the rest of a training step would
        if x.device.type == "cuda":
            torch.cuda.synchronize()
        self._passed.clear()
        begun = time.perf_counter()
        output.backward()
        backward = time.perf_counter() - begun
        if x.device.type == "cuda":
            torch.cuda.synchronize()
        if [mark for mark, _ in self._passed] != self._marks:
            raise RuntimeError("gradients did not become ready in the order of the marks")
        return Times(backward, [seconds for _, seconds in self._passed])

    @property
    def bucket_bytes(self) -> list[int]:
        """Return the gradient bytes of each bucket, in launch order; empty for a bare model."""
        if self.model is self.bare:
            return []
        if type(self.model) is StockDDP:  # exact, because isinstance() also holds for ours
            return bucket_bytes(self.model)
        return [sum(each.nbytes for each in bucket.params) for bucket in self.model.reducer.buckets]


def time_rounds(subjects: Mapping[Key, Subject], rounds: int, end: float) -> dict[Key, list[Times]]:
    """Check the subjects, then time them in shuffled rounds until ``end``.

    Raises:
        RuntimeError: before anything is timed: gradients differ from the first subject's, or a
            subject has unexpected buckets, or sends nothing although it should.
    """
    x = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    sweep = torch.randn(2**23)  # 32 MiB
    expected: list[Tensor] = []
    for key, subject in subjects.items():
        for _ in range(SETTLED):
            subject.step(x, sweep)
            found: list[Any] = [param.grad for param in subject.bare.parameters()]
            expected = expected or [grad.clone() for grad in found]
            if not all(map(torch.equal, found, expected)):
                raise RuntimeError(f"gradients of {key} are not those of the first model")
        if subject.bucket_bytes != subject.expected_bytes:
            raise RuntimeError(
                f"buckets of {key} hold {subject.bucket_bytes} B, not {subject.expected_bytes}"
            )
        sent, _ = sent_in(partial(subject.step, x, sweep), subject.model, world_size=1)
        if bool(sent) != subject.sends:
            raise RuntimeError(f"{key} sends {sent} bytes in a step")
    ways = {key: partial(subject.step, x, sweep) for key, subject in subjects.items()}
    return deadline.interleaved(ways, deadline.rounds(rounds, end, discarded=WARMUPS))
