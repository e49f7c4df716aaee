"""Compare what a program has seen with the oracle, with stock DDP, and with the other ranks."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch import Tensor

from differential.in_ranks import IN_PLACE, PLAIN, STOCK, Played, play_program
from differential.kinds import program_of
from differential.oracle import Expected, Oracle
from differential.program import Program
from differential.trace import Entry, Snapshot, Trace, dense
from differential.wrappers import OURS

# More than a batch of these networks gives to a row.
_TERMS_OF_A_ROW = 64
# How far sums in another order may be apart after some steps, by dtype.
_NEAR: dict[Any, float] = {torch.float64: 1e-9, torch.bfloat16: 0.01}
_DIVERGED = 1e12


def differences(
    seeds: Sequence[int], world_size: int, kind: str = "usual", wrapper: str = OURS
) -> Iterator[str]:
    """Play programs with a class of ``WRAPPERS``; yield at most one difference for each."""
    judge = {"hostile": _compare_with_stock, "sharded": _compare_with_plain}.get(kind, _compare_all)
    torch.set_num_threads(1)
    for seed in seeds:
        program = program_of(kind, seed, world_size)
        try:
            played = run_ranks(play_program, world_size, kind, seed, wrapper, timeout=90)
            what = next(judge(program, played), "")
        except pytest.fail.Exception as failed:
            what = str(failed)
        if what:
            yield f"{what}\n{program}"


def _compare_all(program: Program, played: Sequence[Played]) -> Iterator[str]:
    """Compare with the oracle, with stock DDP, and between the ways of tritonddp."""
    if IN_PLACE in played[0]:
        # In place buffers are sent to the other ranks at another time.
        if Oracle(program, in_place=True).syncs_afterwards:
            yield from judged(program, IN_PLACE, [each[IN_PLACE] for each in played])
        else:
            yield from _compared(program, played, IN_PLACE, OURS)
    yield from judged(program, OURS, [each[OURS] for each in played])
    if STOCK in played[0]:
        is_sparse = "sparse embedding" in program.network.blocks  # rounded in another order
        if program.world_size == 2 and not is_sparse:
            yield from _compared(program, played, OURS, STOCK, _is_equal)
        else:
            # On three ranks stock adds in another order, and the trainings move apart.
            yield from judged(program, STOCK, [each[STOCK] for each in played])


def _compared(
    program: Program,
    played: Sequence[Played],
    title: str,
    other: str,
    is_same: Callable[[Entry, Entry], bool] = operator.eq,
    end: float = inf,
) -> Iterator[str]:
    """The entries before action ``end`` that differ between ``title`` and ``other``."""
    for rank, each in enumerate(played):
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

    On more ranks, what has the same bits on all ranks with stock must have the same bits here.
    """
    if program.world_size == 2:
        yield from _compared(program, played, OURS, STOCK)
        return
    # After a divergence numbers are rounding errors.
    diverged = (entry.action for each in played for entry in each[STOCK] if _is_diverged(entry))
    yield from _compared(program, played, OURS, STOCK, _is_near, min(diverged, default=inf))
    with_stock, here = (_different_on_ranks(played, title) for title in (STOCK, OURS))
    # Once the ranks have different parameters, their bits are the same only by chance.
    end = min((action for action, kind, _ in with_stock if kind == "parameter"), default=inf)
    for place in sorted(here - with_stock):
        if place[0] < end:
            yield f"{place} has the same bits on all ranks with {STOCK}, and not here"


def _different_on_ranks(played: Sequence[Played], title: str) -> set[tuple[int, str, str]]:
    """The places at which rank 0 saw other bits than another rank that saw something there."""
    first, *others = ({entry.place: entry.seen for entry in each[title]} for each in played)
    return {
        place for each in others for place in first.keys() & each if first[place] != each[place]
    }


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
    if isinstance(mine.seen, str) or isinstance(its.seen, str):
        return mine.seen == its.seen
    return not _difference(mine.seen, its.seen)


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
    return torch.allclose(_wide(a), _wide(b), rtol=bound, atol=bound, equal_nan=True)


def judged(program: Program, title: str, traces: Sequence[Trace]) -> Iterator[str]:
    """Compare what the ranks saw with the oracle, which starts each action from what they had."""
    oracle = Oracle(program, in_place=title == IN_PLACE)
    for number in range(len(program.actions) + 1):
        seen = [[entry for entry in trace if entry.action == number] for trace in traces]
        expected = oracle.finish() if number == len(program.actions) else oracle.perform(number)
        if title == STOCK:
            expected = [list(map(_loosened, of_rank)) for of_rank in expected]
        pairs = []
        for rank, (entries, wanted) in enumerate(zip(seen, expected, strict=True)):
            places = [entry.place for entry in entries]
            if places != [each.place for each, _ in wanted]:
                yield f"{title}, rank {rank} saw {places}, but not {[e.place for e, _ in wanted]}"
                return
            for entry, (each, bound) in zip(entries, wanted, strict=True):
                if found := _difference(entry.seen, each.seen, bound):
                    yield f"{_where(program, title, rank, entry)} {found}"
            if entries:
                pairs.append(list(zip(entries, (each for each, _ in wanted), strict=True)))
        # If all ranks must see the same, the bits must be the same.
        for of_ranks in zip(*pairs, strict=True):
            sides = zip(*of_ranks, strict=True)
            mine, its = ({each.seen and each.seen.content for each in side} for side in sides)
            if len(mine) > len(its) == 1:
                entry, _ = of_ranks[0]
                yield f"{_where(program, title, 0, entry)} has other bits than on another rank"
        oracle.adopt(seen)


def _loosened(expected: Expected) -> Expected:
    """Stock averages stale gradients of unused parameters again, if they are views."""
    entry, bound = expected
    if entry.kind != "gradient" or entry.seen is None or bound is not None:
        return expected
    value = dense(entry.seen.tensor())
    return entry, value.abs().double() * 4 * torch.finfo(value.dtype).eps


def _difference(seen: Snapshot | None, wanted: Snapshot | None, bound: Tensor | None = None) -> str:
    """The difference in words, or ``""``."""
    if seen == wanted:
        return ""
    if seen is None or wanted is None or seen.kind != wanted.kind:
        return f"is {_shown(seen)}, but should be {_shown(wanted)}"
    if seen.order != wanted.order:
        return f"has strides {seen.strides}, but should have {wanted.strides}"
    mine, value = (dense(each.tensor()) for each in (seen, wanted))
    bound = torch.zeros(()) if bound is None else bound
    if wanted.strides is None:
        # The terms of a row of a sparse gradient may be added in any order.
        bound = bound + float(value.abs().max()) * _TERMS_OF_A_ROW * torch.finfo(value.dtype).eps
    same = (mine == value) | (mine.isnan() & value.isnan())
    # What may overflow has no bound.
    distance = (_wide(mine) - _wide(value)).abs().masked_fill(same | bound.isposinf(), 0.0)
    if bool((distance <= bound).all()):  # never of NaN
        return ""
    share = float((distance / bound).nan_to_num(0.0).max())
    return (
        f"is\n{_shown(seen)}\nbut should be\n{_shown(wanted)}\nand is {share:.3g} times as far "
        "from it as rounding may bring it\n"
    )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _where(program: Program, title: str, rank: int, entry: Entry) -> str:
    name = f" of {entry.name}" if entry.name else ""
    return f"{title}, rank {rank}, {program.where(entry.action)}: {entry.kind}{name}"


def _shown(value: Snapshot | str | None) -> str:
    """The first elements, with all digits."""
    if value is None or isinstance(value, str):
        return str(value)
    tensor = dense(value.tensor())
    elements = ", ".join(f"{each:.9g}" for each in tensor.flatten()[:8].tolist())
    more = f", ... ({tensor.numel()} elements)" if tensor.numel() > 8 else ""
    layout = "sparse " if value.strides is None else ""
    return f"{layout}{tensor.dtype} {tuple(tensor.shape)} [{elements}{more}]"
