"""Compare what a program has seen with the oracle, with stock DDP, and with the other ranks."""

import operator
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch import Tensor

from differential.actions.gradients import ChangeGradients
from differential.actions.probes import Probe
from differential.actions.training import Backward, Step, ZeroGrad
from differential.in_ranks import (
    ALARM,
    IN_PLACE,
    OTHER,
    OURS,
    PLAIN,
    STOCK,
    Played,
    play_all,
)
from differential.kinds import program_of
from differential.oracle import Expected, Oracle
from differential.player import TIMEOUT
from differential.program import Action, Program
from differential.trace import Entry, Snapshot, Trace, dense

# More than a batch of these networks gives to a row.
_TERMS_OF_A_ROW = 64
# How far sums in another order may be apart after some steps, by dtype.
_NEAR: dict[Any, float] = {torch.float64: 1e-9, torch.bfloat16: 0.01}
_DIVERGED = 1e12


@dataclass(frozen=True)
class Difference:
    """A difference that a program has found."""

    program: Program
    what: str  # in words

    def __str__(self) -> str:
        return f"{self.what}\n{self.program}\nTo play it again: {self.program.command}"


def differences(
    seeds: Sequence[int],
    world_size: int,
    kind: str = "usual",
    wrapper: str = OURS,
) -> Iterator[Difference]:
    """Play programs on ``world_size`` ranks; yield at most one difference for each.

    Args:
        seeds: of the programs.
        world_size: number of ranks.
        kind: of the programs.
        wrapper: the class that plays them, of :data:`in_ranks.WRAPPERS`.
    """
    left = list(seeds)
    # A program that hangs may be the last one.
    limit = 3 * TIMEOUT + len(left) * (2 if kind == "hostile" else 15)
    with tempfile.TemporaryDirectory(prefix="tritonddp-differential-") as folder:
        while left:
            failure = ""
            try:
                run_ranks(play_all, world_size, left, folder, kind, wrapper, timeout=limit)
            except pytest.fail.Exception as failed:
                failure = str(failed)
            while left and (played := _read(Path(folder), left[0], world_size)) is not None:
                program = program_of(kind, left.pop(0), world_size)
                judges = {"hostile": _compare_with_stock, "sharded": _compare_with_plain}
                what = next(judges.get(kind, _compare_all)(program, played), None)
                if what is not None:
                    yield Difference(program, what)
            if failure and left:
                yield Difference(program_of(kind, left.pop(0), world_size), failure)


def _read(folder: Path, seed: int, world_size: int) -> list[Played] | None:
    """What each rank has written, if all have."""
    paths = [folder / f"{seed}.{rank}" for rank in range(world_size)]
    if not all(path.exists() for path in paths):
        return None
    played = [pickle.loads(path.read_bytes()) for path in paths]
    for path in paths:
        path.unlink()
    return played


def _compare_all(program: Program, played: Sequence[Played]) -> Iterator[str]:
    """Compare with the oracle, with stock DDP, and between the ways of tritonddp."""
    end = len(program.actions) + 1
    if IN_PLACE in played[0]:
        has_buffers = any(entry.kind == "buffer" for entry in played[0][IN_PLACE])
        # In place buffers are sent to the other ranks at another time.
        if has_buffers and program.options.syncs_buffers and not program.counts:
            traces = [each[IN_PLACE] for each in played]
            yield from Judge(program, IN_PLACE).differences(traces, end)
        else:
            yield from _compared(program, played, IN_PLACE, OURS)
    yield from Judge(program, OURS).differences([each[OURS] for each in played], end)
    if OTHER in played[0]:
        yield from _compared(program, played, OTHER, OURS)
    if STOCK in played[0]:
        is_sparse = "sparse embedding" in program.network.blocks  # rounded in another order
        if program.world_size == 2 and not is_sparse:
            yield from _compared(program, played, OURS, STOCK, _is_equal, end)
        # On three ranks stock adds in another order, and the trainings move apart. Judge both, step
        # by step.
        yield from Judge(program, STOCK).differences([each[STOCK] for each in played], end)


def _compared(
    program: Program,
    played: Sequence[Played],
    title: str,
    other: str,
    is_same: Callable[[Entry, Entry], bool] = operator.eq,
    end: float = inf,
) -> Iterator[str]:
    """The entries before action ``end`` that differ between ``title`` and ``other``."""
    for rank, each in enumerate(filter(None, played)):
        mine, its = ([e for e in each[who] if e.action < end] for who in (title, other))
        for entry, its_entry in zip(mine, its, strict=False):
            if entry.place != its_entry.place or not is_same(entry, its_entry):
                yield (
                    f"{_where(program, title, rank, entry)} is {_shown(entry.seen)}, and with "
                    f"{other} {its_entry.kind} {its_entry.name} is {_shown(its_entry.seen)}"
                )
        if len(mine) != len(its):
            yield f"rank {rank} saw {len(mine)} things with {title}, and {len(its)} with {other}"


def _compare_with_stock(program: Program, played: Sequence[Played]) -> Iterator[str]:
    """Compare with stock DDP: bit by bit on two ranks, up to rounding on more.

    If the bits of stock are the same on all ranks, the bits of tritonddp must be too.
    """
    for rank, each in enumerate(played):
        for entry in each.get(ALARM, ()):
            yield f"rank {rank}: {ALARM} says {entry.seen}"
    if program.world_size == 2:
        yield from _compared(program, played, OURS, STOCK)
    else:
        # After a divergence numbers are rounding errors.
        diverged = (e.action for each in played for e in each[STOCK] if _is_diverged(e))
        end = min(diverged, default=inf)
        yield from _compared(program, played, OURS, STOCK, _is_near, end)
    # A rank that does something alone has seen more than the others.
    by_place = [
        {
            mine.place: (its.seen, mine.seen)
            for its, mine in zip(each[STOCK], each[OURS], strict=True)
        }
        for each in played
    ]
    # Once a rank has trained alone, bits are equal by chance.
    changed = (n for n in range(len(program.actions)) if _sets_ranks_apart(*program.actions[n:]))
    until = min(changed, default=inf)
    for place, (its, mine) in by_place[0].items():
        if place[0] >= until:
            continue
        others = [each[place] for each in by_place[1:] if place in each]
        if all(stocks == its for stocks, _ in others) and any(ours != mine for _, ours in others):
            yield f"{place} has the same bits on all ranks with stock DDP, and not here"


def _sets_ranks_apart(action: Action, *later: Action) -> bool:
    """Return True if a rank changes gradients or parameters alone, even only in the last bit."""
    if isinstance(action, Probe) and action.end == "left":
        # A reduced backward averages what is left, too.
        then = (each for each in later if isinstance(each, Step | Backward | ZeroGrad))
        return isinstance(next(then, None), Step)
    return isinstance(action, ChangeGradients)


def _compare_with_plain(program: Program, played: Sequence[Played]) -> Iterator[str]:
    """Compare a sharded optimizer with the plain one, up to rounding."""
    yield from _compared(program, played, OURS, PLAIN, _is_near_or_elsewhere)
    parameters = [[e for e in each[OURS] if e.kind == "parameter"] for each in played]
    for entries in zip(*parameters, strict=True):
        if any(entry != entries[0] for entry in entries):
            yield f"{_where(program, OURS, 0, entries[0])} has other bits than on another rank"


def _is_near_or_elsewhere(mine: Entry, its: Entry) -> bool:
    """Only the owner of a parameter has its gradient."""
    return (mine.kind == "gradient" and mine.seen is None) or _is_near(mine, its, {})


def _is_equal(mine: Entry, its: Entry) -> bool:
    """Return True if the bits are the same, except for the sign of zeros."""
    if not isinstance(mine.seen, Snapshot) or not isinstance(its.seen, Snapshot):
        return mine.seen == its.seen
    value = Expected(its.place, its.seen.tensor(), None, its.seen.strides)
    return mine.seen == its.seen or not _difference(mine.seen, value)


def _is_diverged(entry: Entry) -> bool:
    """Return True for a parameter with NaN or very large numbers."""
    if entry.kind != "parameter" or not isinstance(entry.seen, Snapshot):
        return False
    return not bool((dense(entry.seen.tensor()).abs() < _DIVERGED).all())


def _is_near(mine: Entry, its: Entry, bounds: Mapping[torch.dtype, float] = _NEAR) -> bool:
    """Return True if only the rounding of sums in another order differs: 1e-5, or the bound."""
    if mine.seen == its.seen:
        return True
    if not isinstance(mine.seen, Snapshot) or not isinstance(its.seen, Snapshot):
        return False
    if (mine.seen.dtype, mine.seen.shape) != (its.seen.dtype, its.seen.shape):
        return False
    a, b = dense(mine.seen.tensor()), dense(its.seen.tensor())
    if not (a.is_floating_point() or a.is_complex()):
        return False
    bound = bounds.get(a.dtype, 1e-5)
    wide = torch.complex128 if a.is_complex() else torch.float64
    return torch.allclose(a.to(wide), b.to(wide), rtol=bound, atol=bound, equal_nan=True)


class Judge:
    """Compares what the ranks saw with the oracle, action by action.

    Args:
        program: what is played.
        title: of the way in which it was played.
    """

    def __init__(self, program: Program, title: str) -> None:
        self._program, self._title = program, title
        self._oracle = Oracle(program, in_place=title == IN_PLACE)
        self._next = 0  # action that was not judged yet

    def differences(self, traces: Sequence[Trace], end: int) -> Iterator[str]:
        """In words, of the actions before ``end``; the oracle starts each from what ranks had."""
        for number in range(self._next, end):
            seen = [[entry for entry in trace if entry.action == number] for trace in traces]
            yield from self._of_action(number, seen)
        self._next = end

    def _of_action(self, number: int, seen: Sequence[Sequence[Entry]]) -> Iterator[str]:
        program, title, oracle = self._program, self._title, self._oracle
        is_end = number == len(program.actions)
        expected = oracle.finish() if is_end else oracle.perform(number)
        if title == STOCK:
            expected = [list(map(_loosened, of_rank)) for of_rank in expected]
        for rank, (entries, wanted) in enumerate(zip(seen, expected, strict=True)):
            places = [entry.place for entry in entries]
            if places != [each.place for each in wanted]:
                yield f"{title}, rank {rank} saw {places}, but not {[e.place for e in wanted]}"
                return
            for entry, each in zip(entries, wanted, strict=True):
                if found := _difference(entry.seen, each):
                    yield f"{_where(program, title, rank, entry)} {found}"
        pairs = [list(zip(*both, strict=True)) for both in zip(seen, expected, strict=True)]
        for of_ranks in zip(*filter(None, pairs), strict=True):
            column, wanted = zip(*of_ranks, strict=True)
            yield from _among_ranks(program, title, column, wanted)
        oracle.adopt(seen)


def _loosened(expected: Expected) -> Expected:
    """Stock averages stale gradients of unused parameters again, if they are views."""
    value = expected.value
    if expected.place[1] != "gradient" or value is None or expected.bound is not None:
        return expected
    return replace(expected, bound=dense(value).abs().double() * 4 * torch.finfo(value.dtype).eps)


def _among_ranks(
    program: Program, title: str, seen: Sequence[Entry], wanted: Sequence[Expected]
) -> Iterator[str]:
    """If all ranks must see the same, the bits must be the same."""
    contents = [entry.seen and entry.seen.content for entry in seen]
    if len({*contents}) == 1:
        return
    if len({each.value is not None and Snapshot.of(each.value).content for each in wanted}) == 1:
        yield f"{_where(program, title, 0, seen[0])} has other bits than on another rank"


def _difference(seen: Snapshot | None, expected: Expected) -> str:
    """The difference in words, or ``""``."""
    value = expected.value
    if value is None or seen is None:
        if value is seen is None:
            return ""
        return f"is {_shown(seen)}, but should be {_shown(value)}"
    if (seen.dtype, seen.shape) != (value.dtype, tuple(value.shape)):
        kind = f"{value.dtype} {tuple(value.shape)}"
        return f"is {seen.dtype} {seen.shape}, but should be {kind}"
    if (seen.strides is None) != value.is_sparse:
        return f"should {'' if value.is_sparse else 'not '}be sparse"
    if expected.strides is not None and _order(seen.shape, seen.strides) != _order(
        seen.shape, expected.strides
    ):
        return f"has strides {seen.strides}, but should have {expected.strides}"
    bound = expected.bound
    if value.is_sparse:
        bound = _loosened_for_rows(value, bound)
    tensor, value = dense(seen.tensor()), dense(value)
    same = _same(tensor, value)
    if bool(same.all()):
        return ""
    if bound is None:
        return f"is\n{_shown(tensor)}\nbut should be exactly\n{_shown(value)}\n"
    wide = torch.complex128 if value.is_complex() else torch.float64
    # What may overflow has no bound.
    distance = (tensor.to(wide) - value.to(wide)).abs().masked_fill(same | bound.isposinf(), 0.0)
    if bool((distance <= bound).all()):  # never of NaN
        return ""
    share = float((distance / bound).nan_to_num(0.0).max())
    return (
        f"is\n{_shown(tensor)}\nbut should be\n{_shown(value)}\nand is {share:.3g} times as far "
        "from it as rounding may bring it\n"
    )


def _loosened_for_rows(value: Tensor, bound: Tensor | None) -> Tensor:
    """The terms of a row of a sparse gradient may be added in any order."""
    largest = float(dense(value).abs().max())
    return largest * _TERMS_OF_A_ROW * torch.finfo(value.dtype).eps + (
        torch.zeros(()) if bound is None else bound
    )


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Which elements are the same."""
    return (a == b) | (a.isnan() & b.isnan())


def _order(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides, without those of dimensions of one element."""
    if 0 in shape:
        return []
    return [stride for size, stride in zip(shape, strides, strict=True) if size > 1]


def _where(program: Program, title: str, rank: int, entry: Entry) -> str:
    name = f" of {entry.name}" if entry.name else ""
    return f"{title}, rank {rank}, {program.where(entry.action)}: {entry.kind}{name}"


def _shown(value: Snapshot | Tensor | str | None) -> str:
    """The first elements, with all digits."""
    if value is None or isinstance(value, str):
        return str(value)
    tensor = dense(value.tensor() if isinstance(value, Snapshot) else value.detach())
    elements = ", ".join(f"{each:.9g}" for each in tensor.flatten()[:8].tolist())
    more = f", ... ({tensor.numel()} elements)" if tensor.numel() > 8 else ""
    return f"{tensor.dtype} {tuple(tensor.shape)} [{elements}{more}]"
