"""The faults: kind x point x ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from faults.points import POINTS, Point, point_of

# By kind: the state of the victim in the errors of the other ranks.
LOST = {
    "kill": "has ended",
    "orphan": "has ended",
    "leave": "has ended",
    "stop": "is stopped",
    "loop": "is running but has not reported",
    "behind": "is running but has not reported",
}


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: one of :data:`LOST` (the victim no longer responds), ``"raise"`` or ``"interrupt"``
            (its loop catches an exception), ``"nan"`` (in its gradient), or ``"differ"`` (it runs
            other operations than the other ranks).
        at: one of :data:`~faults.points.POINTS`; for ``"differ"`` a key of ``differences.py``.
        ranks: the number of ranks.
        victim: the rank of the fault.
        options: options of the wrapper.
        text: a regular expression that each error must match.
        continues: training continues after the error, with correct gradients.
        is_stall: the victim does not end; the other ranks notice at the group's timeout.
        hosts_store: the victim hosts the group's store.
        aborts: gloo ends a process, which may not be the victim.
        detail: with ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` and the log at level DEBUG.
    """

    kind: str
    at: str
    ranks: int
    victim: int
    options: tuple[tuple[str, Any], ...] = ()
    text: str = ""
    continues: bool = False
    is_stall: bool = False
    hosts_store: bool = False
    aborts: bool = False
    detail: bool = False

    @property
    def point(self) -> Point:
        return point_of(self.at)

    @property
    def name(self) -> str:
        flags = {True: "", False: "no "}
        options = [
            f"{flags[value]}{name}" if value in flags else str(value)
            for name, value in self.options
        ]
        parts = [self.kind, self.at, f"{self.victim}-of-{self.ranks}", *options]
        parts += ["host"] * self.hosts_store + ["detail"] * self.detail
        return "-".join(part.replace(" ", "-").replace("'", "") for part in parts)

    @property
    def is_fatal(self) -> bool:
        return self.kind in LOST or (self.kind == "differ" and not self.continues)

    @property
    def leaves_a_step_out(self) -> bool:
        """The victim catches its exception, and the other ranks wait for its parameters."""
        return self.kind in ("raise", "interrupt") and not self.continues

    @property
    def lost(self) -> set[int]:
        """The ranks that must be killed."""
        return {self.victim} if self.kind in LOST or self.is_stall else set()


VIEWS = (("gradient_as_bucket_view", True),)
INT8 = (("compression", "int8"),)
UNCHECKED = (("init_sync", False),)
CHECKED = (("check_finite", "raise"),)
PROCESS_GROUP = (("transport", "process_group"),)
WORDS: dict[str, tuple[tuple[str, Any], ...]] = {
    "views": VIEWS,
    "int8": INT8,
    "group": PROCESS_GROUP,
}
# Points inside a step of the optimizer.
OF_STEPS = {"before a sharded step", "step of owners", "between step and values"}

# The errors of ranks that wait through memory for ranks that wait in the process group.
_OTHER_BACKWARD = (
    "through the process group .*, but this rank reduces bucket 0 of"
    "|onnection (closed|reset) by peer"
)
_REQUEST = r"rank 0: reduce_gradients\(\) of accumulated gradients; rank 1: the first"
_NUMBERS = "rank 0 has 'number 0 .*rank 1 has 'number 1"
# Without torch's debug level, gloo would end a process or compute wrong sums.
_MISMATCH = r"bucket 0 \('layers.*Detected mismatch between collectives on ranks"
_ALL_REDUCES = (
    r"(?s)step 1, bucket 0 \('layers.*all-reduce of \d+ bytes failed: .*: ALLREDUCE of "
    r"\[\d+\] Double, #\d+, but .*: ALLREDUCE of \[\d+\] Double.* failed at a different place: "
    r"step 1, bucket 0 \('layers.*all-reduce of \d+ bytes\.\n"
)
_NOT_FINITE = r"NaN or Inf in the gradients of 'layers.1.weight' \(bucket \d\) on rank "
_ELSEWHERE = r"(?s)step 1, bucket 0 \(.*rank \d failed at a different place: step 1, bucket 0 \("


def _differs(at: str, ranks: int, victim: int, text: str = "", **more: Any) -> Fault:
    return Fault("differ", at, ranks, victim, text=text, **more)


def _strikes() -> Iterator[Fault]:
    """The faults of all points."""
    for at, point in POINTS.items():
        for strike in filter(None, point.strikes.split(", ")):
            kind, place, *words = strike.split()
            victim, _, ranks = place.partition("/")
            # The victim leaves out a step of the optimizer, which the other ranks do not know.
            is_left_out = kind in ("raise", "interrupt") and at in OF_STEPS
            yield Fault(
                kind,
                at,
                int(ranks),
                int(victim),
                sum((WORDS[word] for word in words), ()),
                continues=kind not in LOST and not is_left_out,
                is_stall=LOST.get(kind, "has ended") != "has ended",
            )


FAULTS = {
    fault.name: fault
    for fault in [
        *_strikes(),
        Fault("kill", "inside the forward", 3, 0, hosts_store=True),
        Fault("kill", "end of backward", 2, 0, detail=True),
        _differs("wider module", 3, 1, "rank 0 has .6, 6. .*rank 1 has .8, 8."),
        _differs("other bucket sizes", 2, 1, "option 'bucket sizes': rank 0 has .*, rank 1 has"),
        _differs("one more backward", 3, 1, "rank 1: another backward", continues=True),
        _differs("reduce_gradients on one rank", 2, 0, _OTHER_BACKWARD),
        _differs("other wrapper first", 3, 1, _OTHER_BACKWARD),
        _differs("another parameter", 3, 1, "'layers.1.weight' .*: rank 1 has", continues=True),
        _differs("smaller wrapper first", 2, 1, _OTHER_BACKWARD),
        _differs("smaller wrapper first", 2, 1, options=PROCESS_GROUP, aborts=True),
        _differs("other wrapper first", 3, 1, _NUMBERS, options=PROCESS_GROUP, continues=True),
        _differs("smaller wrapper first", 2, 1, _MISMATCH, detail=True),
        _differs("wider module", 3, 1, _ALL_REDUCES, options=UNCHECKED, detail=True),
        _differs("other bucket sizes", 2, 1, _ELSEWHERE, options=UNCHECKED, detail=True),
        _differs(
            "reduce_gradients on one rank", 2, 0, _REQUEST, options=PROCESS_GROUP, continues=True
        ),
        _differs("no_sync on one rank", 2, 1, is_stall=True),
        *[
            Fault("nan", at, ranks, victim, options, _NOT_FINITE + str(victim), continues=True)
            for at, ranks, victim, options in (
                ("between buckets", 3, 1, CHECKED),
                ("between buckets", 2, 0, CHECKED + VIEWS),
                ("gradients between hosts", 6, 3, CHECKED + INT8),
            )
        ],
    ]
}
