"""Predicts how long it takes to synchronise gradients: collectives, kernels, overlap with compute.

The model needs few figures. They can be measured in a second
(:mod:`tritonddp.features.auto_compression.probe`) or be given by hand. It is pure arithmetic: the
same figures give the same answer on every rank. A *wire* is a way in which gradients are sent: in
their own dtype, cast to bf16, or as int8.

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
    """How fast one kind of collective is on one rank, in seconds."""

    call: float  # of each call, for any message and number of ranks
    byte: float  # for each byte that the rank sends
    core: float = 0.0  # the part of ``byte`` in which a CPU core works; the rest is waiting
    latency: float = 0.0  # of each round, that is of a message to another rank of any length


@dataclass(frozen=True)
class Kernel:
    """Seconds of a kernel: of each launch, with the host's part, and of each element.

    On a CPU they hold for a core that does nothing else.
    """

    launch: float
    element: float

    def seconds(self, elements: float) -> float:
        return self.launch + self.element * elements if elements else 0.0


@dataclass(frozen=True)
class WireCost:
    """The cost of a wire."""

    name: str
    element_bytes: float  # bytes sent for an element that may be quantised
    speeds: Mapping[Kind, Speed]  # of its collectives, in their order
    fill: Kernel  # makes the message; the backward waits for it
    empty: Kernel  # writes the result into .grad, after the backward
    # Sums, between two collectives, the elements that this rank owns, from all ranks; runs beside
    # the backward. None where the collective itself sums.
    reduce: Kernel | None = None
    is_direct: bool = False  # one collective, in which each rank sends all its message to all ranks

    @property
    def is_quantised(self) -> bool:
        return self.reduce is not None


@dataclass(frozen=True)
class Load:
    """The elements of a bucket."""

    elements: int  # elements that may be quantised
    exact: int = 0  # further elements, sent in fp32 where the others are quantised

    @property
    def total(self) -> int:
        return self.elements + self.exact


@dataclass(frozen=True)
class Stage:
    """A part of a bucket's :class:`Passage`: a collective, or the kernel between two of them."""

    kind: Kind | None  # None for the kernel
    seconds: float  # if nothing else runs
    core: float  # the part of these seconds in which a CPU core works


@dataclass(frozen=True)
class Passage:
    """All work on a bucket from its gradients to the means in ``.grad``, in seconds."""

    fill: float  # on the thread or the stream that computes
    stages: tuple[Stage, ...]  # one after the other
    empty: float  # on the thread or the stream that computes

    @property
    def alone(self) -> float:
        """Seconds if none of it overlaps with compute."""
        return self.fill + sum(stage.seconds for stage in self.stages) + self.empty


@dataclass(frozen=True)
class Compute:
    """The backward itself, which runs while gradients are sent."""

    ready: Sequence[float]  # seconds until each bucket has its last gradient, in launch order
    end: float  # seconds until the backward ends
    # CPU cores for each rank; less than one where ranks share a core. Infinite on a GPU, which
    # sends by engines of its own.
    cores: float = 1.0

    @classmethod
    def in_proportion(cls, loads: Sequence[Load], seconds: float, cores: float = 1.0) -> Compute:
        """Assume that the time of each gradient is proportional to its number of elements.

        For a backward of which only the end was timed. It holds for layers that are matrices.
        Gradients of convolutions take longer for their size, and become ready later than this.
        """
        done = list(accumulate(load.total for load in loads))
        return cls([seconds * each / (done[-1] or 1) for each in done], seconds, cores)


def message_bytes(wire: WireCost, load: Load) -> float:
    """Bytes of a bucket's message on one rank, without trailer and padding."""
    if not wire.is_quantised:
        return load.total * wire.element_bytes
    return load.elements * wire.element_bytes + load.exact * EXACT_BYTES


def sent_bytes(kind: Kind, size: float, world_size: int) -> float:
    """Bytes that a rank sends for a message of ``size`` bytes, by an algorithm that sends least."""
    passes = 2 if kind is Kind.ALL_REDUCE else 1
    return passes * (world_size - 1) / world_size * size


def collective_seconds(kind: Kind, size: float, world_size: int, speed: Speed) -> float:
    """Seconds of a collective that has the network for itself; sources: the module's docstring.

    ``size`` is in bytes: of one rank's input, or for an all-gather of its output.
    """
    if world_size == 1:
        return 0.0
    rounds = (world_size - 1) * (2 if kind is Kind.ALL_REDUCE else 1)
    sent = sent_bytes(kind, size, world_size)
    return speed.call + rounds * speed.latency + sent * speed.byte


def passage(wire: WireCost, load: Load, world_size: int) -> Passage:
    """The passage of a bucket on this wire, with nothing else under way."""
    size = message_bytes(wire, load) * (world_size if wire.is_direct else 1)
    stages = []
    for kind, speed in wire.speeds.items():
        seconds = collective_seconds(kind, size, world_size, speed)
        stages.append(Stage(kind, seconds, sent_bytes(kind, size, world_size) * speed.core))
    if wire.reduce is not None:
        # A rank owns 1 / world_size of the elements, and sums them from world_size ranks.
        work = wire.reduce.seconds(load.total)
        stages.insert(1, Stage(None, work, work))
    return Passage(wire.fill.seconds(load.total), tuple(stages), wire.empty.seconds(load.total))


def step_seconds(compute: Compute, passages: Sequence[Passage]) -> float:
    """Seconds from the start of ``compute`` until the last gradient is in ``.grad``.

    The compute thread fills each bucket when its gradients are ready, and empties all buckets in
    order at its end. The network carries one collective after the other, in launch order. One more
    thread runs the kernels between two collectives of a bucket. If these three want more cores than
    there are, each gets an equal share, and a share that is not used up goes to the others.
    """
    return _Step(compute, passages).run()


@dataclass
class _Task:
    """A task of compute thread, network or kernel thread."""

    left: float  # seconds that it still takes if it runs alone
    core: float  # share of a core that it uses while it runs: 1 for compute and kernels
    bucket: int = 0
    stage: int = -1
    rate: float = 0.0


@dataclass
class _Step:
    """Simulates one step: the compute thread, the network and the kernel thread."""

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
            # The compute thread waits while the bucket that it empties next is not reduced yet.
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
        """The tasks of the compute thread: compute (stage -1), fill (0), empty (1)."""
        # Where ranks share cores, the backward was timed with a share of a core: its work is less.
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
        """Share the cores. A task that needs less than an equal share leaves the rest to others."""
        left = self.compute.cores
        by_demand = sorted(running, key=lambda task: task.core)
        for index, task in enumerate(by_demand):
            share = min(task.core, left / (len(by_demand) - index))
            left -= share
            task.rate = share / task.core if task.core else 1.0
