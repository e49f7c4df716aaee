"""``compression="auto"``: each bucket takes the wire that the cost model chooses for it.

A *wire* is a way in which gradients are sent: in their own dtype, cast to bf16, or as int8. The
speeds of network and kernels are measured at construction. The length of a backward is not known
before the first one: until then all gradients are sent in their own dtypes. The choice is made when
the first reduced backward is over, and again, with the same speeds, when buckets change.
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
from tritonddp.comm.process_group import ProcessGroupTransport
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.features.auto_compression.choice import OWN, Candidates, choose, report
from tritonddp.features.auto_compression.cost_model import Kernel, Kind, Load, Speed, WireCost
from tritonddp.features.auto_compression.probe import Figures, Way, measure, name_of
from tritonddp.kernels.dispatch import gradient_dtype, select_quantized
from tritonddp.kernels.quantized.buffer import BLOCK
from tritonddp.reducer.extension import Events, Extension
from tritonddp.reducer.graph.backward import Backward

logger = logging.getLogger("tritonddp.auto")

QUANTISED = "int8"
# Dtypes of gradients that may take another wire than without compression.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Reduced backwards that are timed. The shortest counts, as the first compile and allocate.
_TIMED = 8

# The wires that the numbers in :attr:`AutoPlanner.state` stand for.
_STATES = (OWN, "bfloat16", QUANTISED)

_BEGAN, _ENDED = "backward began", "backward ended"


def options(dtype: torch.dtype, reduce_dtype: torch.dtype | None = None) -> list[str]:
    """The wires that gradients of ``dtype`` may take; first ``reduce_dtype`` or their own dtype."""
    own = reduce_dtype or dtype
    cast = ["bfloat16"] if own is torch.float32 and reduce_dtype is None else []
    return [name_of(own), *cast, QUANTISED]


def collectives(wire: str, is_direct: bool = False) -> tuple[tuple[Kind, torch.dtype], ...]:
    """The collectives of a bucket on this wire, in order, each with the dtype of its messages.

    For ``is_direct`` see :mod:`tritonddp.kernels.quantized.buffer`.
    """
    if wire == QUANTISED:
        if is_direct:
            return ((Kind.ALL_TO_ALL, torch.uint8),)
        return (Kind.ALL_TO_ALL, torch.uint8), (Kind.ALL_GATHER, torch.uint8)
    return ((Kind.ALL_REDUCE, getattr(torch, wire)),)


def wires(
    figures: Figures, dtype: torch.dtype, reduce_dtype: torch.dtype | None = None
) -> list[WireCost]:
    """The costs of the wires in :func:`options` for gradients of ``dtype``."""
    is_direct = (Kind.ALL_GATHER, name_of(torch.uint8)) not in figures.speeds
    return [
        WireCost(
            name=wire,
            element_bytes=(
                1 + torch.float32.itemsize / BLOCK  # an int8, and its share of the block's scale
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
    """Measure the figures for a choice. Collective: ``dtypes`` are in one order on all ranks."""
    others = _others(wire)
    is_direct = group.size == 2 and select_quantized(device, torch.int8).is_direct
    gather = () if is_direct else (_GATHER,)
    steps = (_EXCHANGE, _REDUCE, *gather, *Way.steps)
    counters = Counters()
    transport = ProcessGroupTransport(group, counters)
    ways = {
        dtype: {
            name: Way(
                make=BucketFactory(others.get(name, wire), group, counters, transport).make,
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
    """The wire formats of ``"bfloat16"`` and ``"int8"``, by name."""
    return {
        "bfloat16": replace(wire, reduce_dtype=torch.bfloat16, compression=None),
        QUANTISED: replace(wire, compression=QUANTISED),
    }


class AutoPlanner(Extension):
    """Chooses wires for the buckets of one reducer. ``wire`` is the format without a choice.

    As an extension it times the first reduced backwards, and removes itself after them.
    """

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
        self._counters = counters  # count the all-reduces of this class too
        self._costs = {each: wires(figures, each, wire.reduce_dtype) for each in figures.dtypes}
        self._wires: tuple[str, ...] = ()  # by bucket index; empty before the first choice
        self._loaded: tuple[str, ...] = ()  # wires from a loaded state, for the next buckets
        self._shortest = math.inf  # seconds of the shortest reduced backward on this rank
        self.explanation = (  # what was chosen, and why
            'compression="auto": gradients travel in their own dtypes, as no backward has been '
            "reduced yet"
        )
        # Time stamps: of timed backwards that were not read yet, and of the one that runs.
        self._timed: list[Moments] = []
        self._running: Moments | None = None
        self._left = _TIMED  # backwards that are still to be timed

    def on_begin(self, backward: Backward) -> None:
        self._running = None
        if backward.reduction is not None:
            self._running = Moments(self._device)
            self._running.mark(_BEGAN)

    def on_compute_end(self, backward: Backward) -> None:
        reduction = backward.reduction
        if self._running is None or reduction is None:
            return
        self._running.mark(_ENDED)
        self._timed.append(self._running)
        self._running = None
        self._left -= 1
        if self._left == 0 and isinstance(reduction.events, Events):
            reduction.events.remove(self)

    def wire_of(self, index: int) -> WireFormat | None:
        """The wire that was chosen for a bucket; ``None`` for its own dtype."""
        return self._others.get(self._wires[index]) if self._wires else None

    def choose(
        self, buckets: Sequence[Sequence[tuple[str, Tensor]]], sparse: Collection[Tensor]
    ) -> bool:
        """Choose wires for buckets of these parameters. Collective.

        Returns whether they differ from the wires before.
        """
        former = self._wires
        if self._loaded:
            self._wires, self._loaded = self._loaded, ()
            if len(self._wires) == len(buckets):
                self.explanation = 'compression="auto": as in the run whose state was loaded'
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
        self.explanation = report(choice, candidates, self._figures, self._costs, backward)
        if self._group.rank == 0:
            logger.info("%s", self.explanation)
        return bool(former) or set(wires) != {OWN}

    @property
    def state(self) -> list[int]:
        """The wires of the buckets, as numbers for :meth:`load`."""
        return [_STATES.index(wire) for wire in self._wires]

    def knows(self, state: Sequence[int]) -> bool:
        """Whether :meth:`load` accepts these numbers."""
        return {*state} <= {*range(len(_STATES))}

    def load(self, state: Sequence[int]) -> None:
        """Take the wires of a saved :attr:`state` for the next buckets; alike on all ranks."""
        self._loaded = tuple(_STATES[number] for number in state)

    def _candidates(
        self, bucket: Sequence[tuple[str, Tensor]], sparse: Collection[Tensor]
    ) -> Candidates:
        names, params = [name for name, _ in bucket], [param for _, param in bucket]
        dtype = gradient_dtype(params[0])
        costs = self._costs.get(dtype)
        if costs is None or params[0] in sparse:
            # It has one wire only, which was not timed: its time does not affect the choice.
            no_time, speeds = Kernel(0.0, 0.0), {Kind.ALL_REDUCE: Speed(0.0, 0.0)}
            return Candidates(Load(0), [WireCost(name_of(dtype), 0.0, speeds, no_time, no_time)])
        elements = [0, 0]
        for is_exact, param in zip(self._exact.find(names, params), params, strict=True):
            elements[is_exact] += param.numel()
        load = Load(*elements)
        return Candidates(load, [c for c in costs if load.elements or not c.is_quantised])

    def _slowest_backward(self) -> float | None:
        """Seconds of each rank's shortest backward, the maximum over the ranks. Collective.

        ``None`` while no rank has timed one. (A rank without inputs times none.)
        """
        for moments in self._timed:
            moments.wait()
            self._shortest = min(self._shortest, moments.nanoseconds(_BEGAN, _ENDED) / 1e9)
        self._timed.clear()
        mine = 0.0 if self._shortest == math.inf else self._shortest
        seconds = torch.tensor(mine, dtype=torch.float32, device=self._device)
        where = f"rank {self._group.rank}, step {self._counters.reductions}"
        what = 'choice of wires for compression="auto"'
        self._group.all_reduce(seconds, where, what, dist.ReduceOp.MAX)
        self._counters.collective(seconds.nbytes, self._group.size, passes=2)
        return seconds.item() or None


def _exchange(bucket: Bucket) -> None:
    """Stands in for the all-to-all: copies the message, so that later steps have input."""
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
    """Stands in for the all-gather: copies the reduced part to the place of each rank's."""
    flat: Any = bucket.flat
    flat.gathered.view(flat.message_layout.world_size, -1).copy_(flat.reduced)


_EXCHANGE, _REDUCE = (None, _exchange), ("reduce", _reduce)
_GATHER = (None, _gather)
