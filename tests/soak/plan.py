"""What each step of a soak does, drawn from a seed: the same on all ranks, and for the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

RANKS = 2
BLOCKS = 5
# A life is long now and then, so that what piles up within one wrapper shows.
_EVERY = 6
LONG = 40


@dataclass(frozen=True)
class Kind:
    """Something that is trained, in turns with the others.

    Attributes:
        name: of it.
        dtype: of its parameters.
        tolerance: how far its parameters may be from the oracle's: each of them, of the largest.
        wires: what its wrappers' ``reduce_dtype`` may be.
        hooks: communication hooks of its wrappers.
        compression: of its wrappers.
    """

    name: str
    dtype: str
    tolerance: float
    wires: tuple[str | None, ...] = (None,)
    hooks: tuple[str | None, ...] = (None,)
    compression: str | None = None


KINDS = (
    # On two ranks a mean is rounded once whoever computes it, and weights whose sum is a power of
    # two bring no rounding but that of the products: equal bits.
    Kind(
        "exact",
        "float64",
        0.0,
        (None, None, "bfloat16", "float16"),
        (None, None, "allreduce", "builtin", "fp16", "bf16", "sum"),
    ),
    # Any weights, over any number of backwards: means of means are rounded in another order.
    Kind("weighted", "float64", 1e-11, hooks=(None, None, "allreduce", "sum")),
    # Quantised, with error feedback.
    Kind("int8", "float32", 0.05, compression="int8"),
)


@dataclass(frozen=True)
class Step:
    """What the ranks do in a step. Tuples are by microbatch, then by rank.

    Attributes:
        number: of the step, from 0.
        toggles: the block that is frozen, or unfrozen, before it.
        replaces: a block whose parameters are replaced by equal ones before it.
        evaluates: a forward without gradients comes first.
        blocks: which ones each forward uses.
        weights: of each backward; ``None`` where none has one.
        reduction: of the losses, where there are weights.
        on_request: all backwards are accumulated, then ``reduce_gradients()`` is called.
        fails: the ranks whose backward raises. The gradients of the step are dropped.
        fails_early: it is the first microbatch, otherwise the last, in which they fail.
        traced: inside ``trace()``.
    """

    number: int
    toggles: int | None
    replaces: int | None
    evaluates: bool
    blocks: tuple[tuple[tuple[int, ...], ...], ...]
    weights: tuple[tuple[float, ...], ...] | None
    reduction: str
    on_request: bool
    fails: tuple[int, ...]
    fails_early: bool
    traced: bool


@dataclass(frozen=True)
class Life:
    """One wrapper, from its making to its end.

    Attributes:
        kind: what it trains.
        begins: how it is made. ``"checkpoint"``: of new modules, from what was saved when the last
            one of this kind ended; ``"copy"``: it is a copy of another wrapper.
        wire: its ``reduce_dtype``.
        hook: its communication hook.
        views, lazy: ``gradient_as_bucket_view``, ``lazy_bucket_allocation``.
        bucket_cap_mb: of its buckets.
        manual: backwards end in ``finalize_backward()``.
        check_drift: the ranks compare their parameters all the time.
        steps: of it.
    """

    kind: Kind
    begins: str
    wire: str | None
    hook: str | None
    views: bool
    lazy: bool
    bucket_cap_mb: float | None
    manual: bool
    check_drift: bool
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        options = {
            "begins": self.begins,
            "wire": self.wire,
            "hook": self.hook,
            "views": self.views,
            "lazy": self.lazy,
            "bucket_cap_mb": self.bucket_cap_mb,
            "manual": self.manual,
            "check_drift": self.check_drift,
        }
        return f"{self.kind.name} ({', '.join(f'{k}={v}' for k, v in options.items())})"


def lives(seed: int, steps: int) -> Iterator[Life]:
    """Lives that have this many steps together."""
    draw = Random(seed)
    number, done = 0, 0
    while done < steps:
        is_long = number % _EVERY == 0
        length = max(LONG, steps // 20) if is_long else draw.randint(8, 24)
        if steps - done - length < 5:  # a life of a step or two sees little
            length = steps - done
        yield _life(draw, KINDS[number % len(KINDS)], done, length)
        number, done = number + 1, done + length


def _life(draw: Random, kind: Kind, first: int, length: int) -> Life:
    hook = draw.choice(kind.hooks)
    wire = None if hook else draw.choice(kind.wires)
    in_half = wire == "float16" or hook == "fp16"
    return Life(
        kind=kind,
        begins=draw.choice(("wrap", "wrap", "checkpoint", "copy")),
        wire=wire,
        hook=hook,
        views=draw.random() < 0.5,
        lazy=draw.random() < 0.3,
        bucket_cap_mb=draw.choice((None, 1e-3, 1e-2)),
        manual=draw.random() < 0.25,
        check_drift=first % 4 > 0,  # no draw: all else is as it was without it
        steps=tuple(
            _step(draw, kind, first + each, each == length - 1, wire, hook, in_half)
            for each in range(length)
        ),
    )


def _step(
    draw: Random,
    kind: Kind,
    number: int,
    is_last: bool,
    wire: str | None,
    hook: str | None,
    in_half: bool,
) -> Step:
    micros = draw.choice((1, 1, 1, 2, 3, 4))
    blocks = tuple(
        tuple(
            # The first block is always used, so that there is a place for a backward to fail in.
            (0, *(block for block in range(1, BLOCKS) if draw.random() < 0.6))
            for _ in range(RANKS)
        )
        for _ in range(micros)
    )
    reduction = draw.choice(("mean", "sum"))
    weights = None
    # (In fp16 small numbers are rounded to multiples of the smallest one: scales show.)
    if draw.random() < 0.4 and not in_half:
        if kind.tolerance:
            weights = tuple(
                tuple(draw.choice((0.0, draw.uniform(0.1, 40.0))) for _ in range(RANKS))
                for _ in range(micros)
            )
        else:
            weights, reduction = _exact_weights(draw, micros, casts=bool(wire or hook))
    fails: tuple[int, ...] = ()
    # What a rank that failed owes to the others it gives in its next forward.
    if draw.random() < 0.02 and not is_last:
        fails = draw.choice(((0,), (1,), (0, 1)))
    # What is new in a wrapper is averaged for once without its hook.
    means = hook in (None, "allreduce", "builtin")
    return Step(
        number=number,
        toggles=draw.randrange(1, BLOCKS) if means and draw.random() < 0.05 else None,
        replaces=draw.randrange(BLOCKS) if means and draw.random() < 0.01 else None,
        evaluates=draw.random() < 0.05,
        blocks=blocks,
        weights=weights,
        reduction=reduction,
        on_request=not fails and draw.random() < 0.1,
        fails=fails,
        fails_early=draw.random() < 0.5,
        traced=draw.random() < 0.02,
    )


def _exact_weights(
    draw: Random, micros: int, casts: bool
) -> tuple[tuple[tuple[float, ...], ...], str]:
    """Weights of which all that is computed is exact, and the reduction of their losses."""
    if micros == 1 and draw.random() < 0.5:
        one = draw.choice((0, 8, 16)) if casts else draw.randint(0, 16)
        return ((float(one), 16.0 - one),), "mean"
    # The weight of a rank, by which its sum is divided and multiplied, is a power of two.
    totals = draw.choice(((8, 8), (16, 0), (0, 16)))
    left, weights = list(totals), []
    for _ in range(micros - 1):
        now = tuple(float(draw.randint(0, each)) for each in left)
        left = [each - int(taken) for each, taken in zip(left, now, strict=True)]
        weights.append(now)
    return (*weights, tuple(map(float, left))), "sum"
