"""What synchronising gradients takes: collectives, kernels, and what of both a backward hides.

A model of few figures, which can all be measured in a second
(:mod:`tritonddp.features.auto_compression.probe`) or be given by hand. Pure arithmetic: the same
figures give the same answer on every rank.

Collectives are those of gloo: a ring for all-reduce and all-gather, a message to each peer in turn
for all-to-all. With latency ``a``, ``b`` seconds a byte, ``W`` ranks and a message of ``S`` bytes
an all-reduce takes ``2 (W-1) a + 2 (W-1)/W S b``, the others half of that (Thakur, Rabenseifner and
Gropp, Optimization of collective communication operations in MPICH, 2005; that no all-reduce sends
less is shown by Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
workstations, 2009).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate

EXACT_BYTES = 4


class Kind(Enum):
    """A collective."""

    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    ALL_GATHER = "all-gather"


@dataclass(frozen=True)
class Speed:
    """How fast one kind of collective is, on one rank; seconds."""

    call: float  # of each, however short its message and few its ranks
    byte: float  # for each byte that the rank sends
    core: float = 0.0  # of these, those that a core of the rank's host works; the rest is waiting
    latency: float = 0.0  # of each round: of a message to another rank, however short


@dataclass(frozen=True)
class Kernel:
    """Seconds of a kernel: of each launch, host included, and of each element.

    On a CPU those of a core that does nothing else.
    """

    launch: float
    element: float

    def seconds(self, elements: float) -> float:
        return self.launch + self.element * elements if elements else 0.0


@dataclass(frozen=True)
class WireCost:
    """How gradients travel, and what that costs."""

    name: str
    element_bytes: float  # of an element that is not exact, as it travels
    speeds: Mapping[Kind, Speed]  # of its collectives, in their order
    fill: Kernel  # makes the message; takes its time from the backward
    empty: Kernel  # brings the result into .grad, when the backward is over
    # Between two collectives, on the elements that one rank owns, from all ranks; runs beside the
    # backward. None where the collective itself adds up.
    reduce: Kernel | None = None
    is_direct: bool = False  # a collective brings all ranks the whole of each rank's message

    @property
    def is_quantised(self) -> bool:
        return self.reduce is not None


@dataclass(frozen=True)
class Load:
    """The elements of a bucket."""

    elements: int  # that may be quantised
    exact: int = 0  # further ones, which travel in fp32 where the others are quantised

    @property
    def total(self) -> int:
        return self.elements + self.exact


@dataclass(frozen=True)
class Stage:
    """A part of a bucket's passage: a collective, or the kernel between two of them."""

    kind: Kind | None  # None for the kernel
    seconds: float  # if nothing else runs
    core: float  # of these, seconds of a core


@dataclass(frozen=True)
class Passage:
    """A bucket's way from its gradients to ``.grad``; seconds."""

    fill: float  # of the thread, or the stream, that computes
    stages: tuple[Stage, ...]  # one after the other
    empty: float  # as fill

    @property
    def alone(self) -> float:
        """Seconds if nothing hides any of it."""
        return self.fill + sum(stage.seconds for stage in self.stages) + self.empty


@dataclass(frozen=True)
class Compute:
    """What is computed while gradients travel."""

    ready: Sequence[float]  # seconds until each bucket has its last gradient, in launch order
    end: float  # until all is computed
    # Of the host, for each rank; less than one where ranks share. On a GPU, whose own engines send:
    # infinite.
    cores: float = 1.0

    @classmethod
    def in_proportion(cls, loads: Sequence[Load], seconds: float, cores: float = 1.0) -> Compute:
        """A backward of which each gradient takes as long as it has elements.

        What is known of a backward whose end alone was timed. True of layers that are matrices;
        convolutions, whose gradients take longer than they are large, come later in theirs.
        """
        done = list(accumulate(load.total for load in loads))
        return cls([seconds * each / (done[-1] or 1) for each in done], seconds, cores)


def message_bytes(wire: WireCost, load: Load) -> float:
    """Bytes of a bucket's message on one rank, without trailer and padding."""
    if not wire.is_quantised:
        return load.total * wire.element_bytes
    return load.elements * wire.element_bytes + load.exact * EXACT_BYTES


def sent_bytes(kind: Kind, size: float, world_size: int) -> float:
    """What a rank sends of a message of ``size`` bytes, if no rank sends more than need be."""
    passes = 2 if kind is Kind.ALL_REDUCE else 1
    return passes * (world_size - 1) / world_size * size


def collective_seconds(kind: Kind, size: float, world_size: int, speed: Speed) -> float:
    """Seconds of a collective that has the line for itself; sources are in the module's docstring.

    ``size`` is that of the message in bytes: what all ranks begin or end with, together.
    """
    if world_size == 1:
        return 0.0
    rounds = (world_size - 1) * (2 if kind is Kind.ALL_REDUCE else 1)
    sent = sent_bytes(kind, size, world_size)
    return speed.call + rounds * speed.latency + sent * speed.byte


def passage(wire: WireCost, load: Load, world_size: int) -> Passage:
    """What a bucket goes through on this wire, with nothing else under way."""
    size = message_bytes(wire, load) * (world_size if wire.is_direct else 1)
    stages = []
    for kind, speed in wire.speeds.items():
        seconds = collective_seconds(kind, size, world_size, speed)
        stages.append(Stage(kind, seconds, sent_bytes(kind, size, world_size) * speed.core))
    if wire.reduce is not None:
        # A rank adds up what it owns, 1 / world_size of the elements, from world_size ranks.
        work = wire.reduce.seconds(load.total)
        stages.insert(1, Stage(None, work, work))
    return Passage(wire.fill.seconds(load.total), tuple(stages), wire.empty.seconds(load.total))


def step_seconds(compute: Compute, passages: Sequence[Passage]) -> float:
    """Seconds until the last gradient is in ``.grad``, from when ``compute`` began.

    The thread that computes fills each bucket when its gradients are ready, and empties all in
    order when it is done. The line carries one collective after the other, in the order in which
    they are asked for; what lies between two collectives of a bucket is done by one further thread.
    Where these want more cores than there are, each gets an equal share and what it leaves goes to
    the others.
    """
    return _Step(compute, passages).run()


@dataclass
class _Task:
    """What one of the three servants is at: ``left`` seconds that it would take alone."""

    left: float
    core: float  # of a core, while it runs: 1 for compute and kernels
    bucket: int = 0
    stage: int = -1
    rate: float = 0.0


@dataclass
class _Step:
    """One step as it passes: three servants, each with its tasks, and what becomes of them."""

    compute: Compute
    passages: Sequence[Passage]
    line: deque[_Task] = field(default_factory=deque)
    kernels: deque[_Task] = field(default_factory=deque)

    def run(self) -> float:
        arrived = [not each.stages for each in self.passages]
        script = self._script()
        main = next(script, None)
        now = 0.0
        while True:
            # The thread that computes stands still while the bucket that it is to empty travels.
            waits = main is not None and main.stage > 0 and not arrived[main.bucket]
            running = [queue[0] for queue in (self.line, self.kernels) if queue]
            if main is not None and not waits:
                running.append(main)
            if not running:
                return now
            self._share(running)
            passed = min(task.left / task.rate for task in running)
            now += passed
            for task in running:
                task.left -= passed * task.rate
            for queue in (self.line, self.kernels):
                if queue and queue[0].left <= 1e-12:
                    done = queue.popleft()
                    if not self._next_stage(done.bucket, done.stage + 1):
                        arrived[done.bucket] = True
            if main is not None and not waits and main.left <= 1e-12:
                if main.stage == 0:
                    self._next_stage(main.bucket, 0)
                main = next(script, None)

    def _script(self) -> Iterator[_Task]:
        """What the thread that computes does: compute (stage -1), fill (0), empty (1)."""
        # Where ranks share cores the backward has less work than it takes seconds.
        share = min(1.0, self.compute.cores)
        before = 0.0
        for bucket, (ready, each) in enumerate(zip(self.compute.ready, self.passages, strict=True)):
            yield _Task(max(0.0, ready - before) * share, 1.0)
            yield _Task(each.fill, 1.0, bucket, 0)
            before = max(before, ready)
        yield _Task(max(0.0, self.compute.end - before) * share, 1.0)
        for bucket, each in enumerate(self.passages):
            yield _Task(each.empty, 1.0, bucket, 1)

    def _next_stage(self, bucket: int, number: int) -> bool:
        """Queue a stage; ``False`` if the bucket has none of this number."""
        stages = self.passages[bucket].stages
        if number >= len(stages):
            return False
        stage = stages[number]
        queue = self.kernels if stage.kind is None else self.line
        core = min(1.0, stage.core / stage.seconds) if stage.seconds else 0.0
        queue.append(_Task(stage.seconds, core, bucket, number))
        return True

    def _share(self, running: Sequence[_Task]) -> None:
        """Who wants less than an equal share of the cores gets that, the others share the rest."""
        left = self.compute.cores
        by_demand = sorted(running, key=lambda task: task.core)
        for place, task in enumerate(by_demand):
            share = min(task.core, left / (len(by_demand) - place))
            left -= share
            task.rate = share / task.core if task.core else 1.0
