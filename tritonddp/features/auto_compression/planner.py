"""``compression="auto"``: each bucket takes the wire that the cost model chooses for it.

What lines and kernels can do is measured at construction. What a backward hides is not known
before there was one: until then all gradients travel in their own dtypes. The choice is made when
the first reduced backward is over, and again, by the same figures, when buckets change.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp._device import Moments
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.formats import BucketFactory, WireFormat
from tritonddp.comm.run import ReductionRun
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.features.auto_compression.choice import OWN, Candidates, choose, report
from tritonddp.features.auto_compression.cost_model import Kernel, Kind, Load, Speed, WireCost
from tritonddp.features.auto_compression.probe import Figures, Way, measure, name_of
from tritonddp.kernels.dispatch import select_quantized
from tritonddp.kernels.quantized.buffer import BLOCK
from tritonddp.reducer.extension import Events, Extension

logger = logging.getLogger("tritonddp.auto")

QUANTISED = "int8"
# Gradients that may take another wire than they take without compression.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Reduced backwards that are timed: the first ones compile, allocate and read what no cache holds.
_TIMED = 8

# What :attr:`AutoPlanner.state` is of.
_STATES = (OWN, "bfloat16", QUANTISED)

_BEGAN, _ENDED = "backward began", "backward ended"


def options(dtype: torch.dtype, reduce_dtype: torch.dtype | None = None) -> list[str]:
    """The wires that gradients of ``dtype`` may take, their own first, which may be cast."""
    own = reduce_dtype or dtype
    cast = ["bfloat16"] if own is torch.float32 and reduce_dtype is None else []
    return [name_of(own), *cast, QUANTISED]


def collectives(wire: str, is_direct: bool = False) -> tuple[tuple[Kind, torch.dtype], ...]:
    """What carries a bucket on this wire, in order, and the dtype of the messages.

    ``is_direct`` is said in :mod:`tritonddp.kernels.quantized.buffer`.
    """
    if wire == QUANTISED:
        if is_direct:
            return ((Kind.ALL_TO_ALL, torch.uint8),)
        return (Kind.ALL_TO_ALL, torch.uint8), (Kind.ALL_GATHER, torch.uint8)
    return ((Kind.ALL_REDUCE, getattr(torch, wire)),)


def wires(
    figures: Figures, dtype: torch.dtype, reduce_dtype: torch.dtype | None = None
) -> list[WireCost]:
    """What the :func:`options` of gradients of ``dtype`` cost."""
    is_direct = (Kind.ALL_GATHER, name_of(torch.uint8)) not in figures.speeds
    return [
        WireCost(
            name=wire,
            element_bytes=(
                1 + torch.float32.itemsize / BLOCK  # a number, and its share of the block's scale
                if wire == QUANTISED
                else getattr(torch, wire).itemsize
            ),
            speeds={
                kind: figures.speed(kind, carried) for kind, carried in collectives(wire, is_direct)
            },
            fill=figures.kernel(dtype, wire, "fill"),
            empty=figures.kernel(dtype, wire, "empty"),
            reduce=figures.kernel(dtype, wire, "reduce") if wire == QUANTISED else None,
            is_direct=is_direct and wire == QUANTISED,
        )
        for wire in options(dtype, reduce_dtype)
    ]


def measured(
    wire: WireFormat, group: Group, device: torch.device, dtypes: Collection[torch.dtype]
) -> Figures:
    """The figures that a choice needs; collective, so ``dtypes`` come in one order on all ranks."""
    others = _others(wire)
    is_direct = group.size == 2 and select_quantized(device, torch.int8).is_direct
    steps = (_EXCHANGE, _REDUCE, *(() if is_direct else (_GATHER,)), _EMPTY)
    ways = {
        dtype: {
            name: Way(
                make=BucketFactory(others.get(name, wire), group, Counters()).make,
                collectives=collectives(name, is_direct),
                steps=steps if name == QUANTISED else Way.steps,
            )
            for name in options(dtype, wire.reduce_dtype)
        }
        for dtype in dtypes
        if dtype in _DTYPES
    }
    with group.guard(f"rank {group.rank}, wrapping", 'timing for compression="auto"'):
        return measure(group.process_group, device, ways)


def _others(wire: WireFormat) -> dict[str, WireFormat]:
    """How gradients travel on a wire that is not their own, by its name."""
    return {
        "bfloat16": replace(wire, reduce_dtype=torch.bfloat16, compression=None),
        QUANTISED: replace(wire, compression=QUANTISED),
    }


class AutoPlanner:
    """Chooses the wires of one reducer's buckets, whose gradients travel as ``wire`` without it."""

    def __init__(
        self,
        wire: WireFormat,
        figures: Figures,
        group: Group,
        device: torch.device,
        counters: Counters,
    ) -> None:
        assert wire.exact is not None
        self._figures = figures
        self._exact = wire.exact
        self._group = group
        self._device = device
        self._others = _others(wire)
        self._counters = counters  # of what the ranks tell each other here, too
        self._costs = {each: wires(figures, each, wire.reduce_dtype) for each in figures.dtypes}
        self._wires: tuple[str, ...] = ()  # of buckets, by index; none before the first choice
        self._loaded: tuple[str, ...] = ()  # of the buckets to come
        self._shortest = math.inf  # reduced backward on this rank; seconds
        self.report = (  # what was chosen, and why
            'compression="auto": gradients travel in their own dtypes, as no backward has been '
            "reduced yet"
        )
        self.timer = BackwardTimer(device)

    def wire_of(self, index: int) -> WireFormat | None:
        """The wire that was chosen for a bucket; ``None`` for its own."""
        return self._others.get(self._wires[index]) if self._wires else None

    def choose(
        self, buckets: Sequence[Sequence[tuple[str, Tensor]]], sparse: Collection[Tensor]
    ) -> bool:
        """Choose wires for buckets of these parameters; were others in force? Collective."""
        former = self._wires
        if self._loaded:
            self._wires, self._loaded = self._loaded, ()
            if len(self._wires) == len(buckets):
                self.report = 'compression="auto": as in the run whose state was loaded'
                return former != self._wires and set(former + self._wires) != {OWN}
        backward = self._slowest_backward()
        if backward is None:
            self._wires = ()
            return bool(former)
        candidates = [self._candidates(bucket, sparse) for bucket in buckets]
        choice = choose(candidates, self._group.size, backward, self._figures.cores)
        wires = tuple(
            OWN if name == each.wires[0].name else name
            for name, each in zip(choice.wires, candidates, strict=True)
        )
        self._wires = wires
        if former == wires:
            return False
        self.report = report(choice, candidates, self._figures, self._costs, backward)
        if self._group.rank == 0:
            logger.info("%s", self.report)
        return bool(former) or set(wires) != {OWN}

    @property
    def state(self) -> list[int]:
        """What the buckets take, as small numbers, for :meth:`load`."""
        return [_STATES.index(wire) for wire in self._wires]

    def knows(self, state: Sequence[int]) -> bool:
        """Whether :meth:`load` can make something of these numbers."""
        return {*state} <= {*range(len(_STATES))}

    def load(self, state: Sequence[int]) -> None:
        """The next buckets take what those took that had this :attr:`state`; alike on all ranks."""
        self._loaded = tuple(_STATES[number] for number in state)

    def _candidates(
        self, bucket: Sequence[tuple[str, Tensor]], sparse: Collection[Tensor]
    ) -> Candidates:
        names, params = [name for name, _ in bucket], [param for _, param in bucket]
        dtype = params[0].dtype
        costs = self._costs.get(dtype)
        if costs is None or params[0] in sparse:
            # No wire was timed; whatever it takes, it takes it whatever is chosen for the others.
            no_time, speeds = Kernel(0.0, 0.0), {Kind.ALL_REDUCE: Speed(0.0, 0.0)}
            return Candidates(Load(0), [WireCost(name_of(dtype), 0.0, speeds, no_time, no_time)])
        elements = [0, 0]
        for is_exact, param in zip(self._exact.find(names, params), params, strict=True):
            elements[is_exact] += param.numel()
        load = Load(*elements)
        return Candidates(load, [c for c in costs if load.elements or not c.is_quantised])

    def _slowest_backward(self) -> float | None:
        """The shortest backward of the rank where it is longest; collective.

        ``None`` while no rank has timed any. (A rank without inputs has none to offer.)
        """
        for moments in self.timer.moments:
            moments.wait()
            self._shortest = min(self._shortest, moments.nanoseconds(_BEGAN, _ENDED) / 1e9)
        self.timer.moments.clear()
        mine = 0.0 if self._shortest == math.inf else self._shortest
        seconds = torch.tensor(mine, dtype=torch.float32, device=self._device)
        where = f"rank {self._group.rank}, step {self._counters.reductions}"
        what = 'choice of wires for compression="auto"'
        self._group.all_reduce(seconds, where, what, dist.ReduceOp.MAX)
        self._counters.collective(seconds.nbytes, self._group.size, passes=2)
        return seconds.item() or None


class BackwardTimer(Extension):
    """Times the first reduced backwards, and is told nothing any more after them."""

    def __init__(self, device: torch.device) -> None:
        self.moments: list[Moments] = []  # of backwards that nobody has looked at yet
        self._device = device
        self._timed = 0
        self._running: Moments | None = None

    def on_begin(self, run: ReductionRun) -> None:
        self._running = None
        if run.reached and not run.is_local:
            self._running = Moments(self._device)
            self._running.mark(_BEGAN)

    def on_compute_end(self, run: ReductionRun) -> None:
        if self._running is None:
            return
        self._running.mark(_ENDED)
        self.moments.append(self._running)
        self._running = None
        self._timed += 1
        if self._timed == _TIMED and isinstance(run.events, Events):
            run.events.remove(self)


def _exchange(bucket: Bucket) -> None:
    """In the place of the all-to-all."""
    flat: Any = bucket.flat
    layout = flat.message_layout
    if layout.is_direct:
        flat.received.view(layout.world_size, -1)[1 - flat.rank].copy_(flat.message)
    else:
        flat.received.copy_(flat.message)


def _reduce(bucket: Bucket) -> None:
    flat: Any = bucket.flat
    select_quantized(flat.data.device, flat.numbers).reduce_parts(flat)


def _gather(bucket: Bucket) -> None:
    """In the place of the all-gather."""
    flat: Any = bucket.flat
    flat.gathered.view(flat.message_layout.world_size, -1).copy_(flat.reduced)


def _empty(bucket: Bucket) -> None:
    flat: Any = bucket.flat
    bucket.unpack(select_quantized(flat.data.device, flat.numbers).receive(flat, None))


_EXCHANGE, _REDUCE = (None, _exchange), ("reduce", _reduce)
_GATHER, _EMPTY = (None, _gather), ("empty", _empty)
