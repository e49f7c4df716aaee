"""The faults: kind x point x ranks."""

import re
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
# Options of the wrapper, by their words in the table of points. Two words set none.
OPTIONS = {
    "views": {"gradient_as_bucket_view": True},
    "int8": {"compression": "int8"},
    "group": {"transport": "process_group"},
    "unchecked": {"init_sync": False},
    "checked": {"check_finite": "raise"},
    "host": {},
    "detail": {},
}


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: one of :data:`LOST` (the victim no longer responds), ``"raise"`` or ``"interrupt"``
            (its loop catches an exception), ``"nan"`` (in its gradient), or ``"differ"`` (it runs
            other operations than the other ranks).
        at: one of :data:`~faults.points.POINTS`; for ``"differ"`` the difference.
        ranks: the number of ranks.
        victim: the rank of the fault.
        words: keys of :data:`OPTIONS`; ``"host"``: the victim hosts the group's store;
            ``"detail"``: with ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` and the log at level DEBUG.
        text: a regular expression that each error must match.
        continues: training continues after the error, with correct gradients.
        is_stall: the victim does not end; the other ranks notice at the group's timeout.
        aborts: gloo ends a process, which may not be the victim.
    """

    kind: str
    at: str
    ranks: int
    victim: int
    words: tuple[str, ...] = ()
    text: str = ""
    continues: bool = False
    is_stall: bool = False
    aborts: bool = False

    @property
    def point(self) -> Point:
        return point_of(self.at)

    @property
    def name(self) -> str:
        parts = [self.kind, self.at, f"{self.victim}-of-{self.ranks}", *self.words]
        return "-".join(parts).replace(" ", "-").replace("'", "")

    @property
    def options(self) -> dict[str, Any]:
        return {k: v for word in self.words for k, v in OPTIONS[word].items()}

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


# Points inside a step of the optimizer.
OF_STEPS = {"before a sharded step", "step of owners", "between step and values"}
_NOT_FINITE = r"NaN or Inf in the gradients of 'layers.1.weight' \(bucket \d\) on rank "

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
_ELSEWHERE = r"(?s)step 1, bucket 0 \(.*rank \d failed at a different place: step 1, bucket 0 \("


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
                tuple(words),
                _NOT_FINITE + victim if "checked" in words else "",
                continues=kind not in LOST and not is_left_out,
                is_stall=LOST.get(kind, "has ended") != "has ended",
            )


def _differs(strike: str, text: str = "", **more: Any) -> Fault:
    """A difference, for example ``"other wrapper first 1/3 group"``."""
    at, victim, ranks, words = re.fullmatch(r"(.*) (\d)/(\d)(.*)", strike).groups()
    return Fault("differ", at, int(ranks), int(victim), tuple(words.split()), text, **more)


FAULTS = {
    fault.name: fault
    for fault in [
        *_strikes(),
        _differs("wider module 1/3", "rank 0 has .6, 6. .*rank 1 has .8, 8."),
        _differs("other bucket sizes 1/2", "option 'bucket sizes': rank 0 has .*, rank 1 has"),
        _differs("one more backward 1/3", "rank 1: another backward", continues=True),
        _differs("another parameter 1/3", "'layers.1.weight' .*: rank 1 has", continues=True),
        _differs("no_sync on one rank 1/2", is_stall=True),
        _differs("reduce_gradients on one rank 0/2", _OTHER_BACKWARD),
        _differs("reduce_gradients on one rank 0/2 group", _REQUEST, continues=True),
        _differs("other wrapper first 1/3", _OTHER_BACKWARD),
        _differs("other wrapper first 1/3 group", _NUMBERS, continues=True),
        _differs("smaller wrapper first 1/2", _OTHER_BACKWARD),
        _differs("smaller wrapper first 1/2 group", aborts=True),
        _differs("smaller wrapper first 1/2 detail", _MISMATCH),
        _differs("wider module 1/3 unchecked detail", _ALL_REDUCES),
        _differs("other bucket sizes 1/2 unchecked detail", _ELSEWHERE),
    ]
}
