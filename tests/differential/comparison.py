"""Programs judged: by the oracle, by stock DDP, and by what the other ranks saw."""

import operator
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path

import pytest
import torch
from distributed import run_ranks
from torch import Tensor

from differential.actions.gradients import PRODUCT, READ, ChangeGradients
from differential.actions.probes import Probe
from differential.actions.training import (
    Backward,
    BreakOff,
    Hold,
    ReduceGradients,
    Renew,
    Step,
    ZeroGrad,
    clips_to_rounding,
)
from differential.actions.wrapping import WrapAgain
from differential.in_ranks import (
    ALARM,
    BESIDE,
    IN_PLACE,
    LONG,
    OURS,
    PLAIN,
    STOCK,
    Played,
    as_in_place,
    play_all,
)
from differential.kinds import program_of
from differential.named import PROGRAMS
from differential.oracle import Expected, Oracle
from differential.player import TIMEOUT
from differential.program import Action, Program
from differential.trace import Entry, Snapshot, Trace, dense

# More than a batch of these networks gives to a row.
_TERMS_OF_A_ROW = 64
# How far sums in another order may be apart after some steps, by dtype.
_NEAR = {torch.float64: 1e-9, torch.bfloat16: 0.01}
_DIVERGED = 1e12


@dataclass(frozen=True)
class Difference:
    """What a program has brought to light."""

    program: Program  # that did
    what: str  # in words

    @property
    def is_stocks(self) -> bool:
        """Whether stock DDP itself has failed: then the generator is wrong."""
        return f"seed {self.program.seed}: {STOCK} raised" in self.what

    def __str__(self) -> str:
        return f"{self.what}\n{self.program}\nTo play it again: {self.program.command}"


def differences(
    seeds: Sequence[int],
    world_size: int,
    kind: str = "usual",
    mutation: str | None = None,
    compiled: bool = False,
    wrapper: str = OURS,
) -> Iterator[Difference]:
    """Play programs on ``world_size`` ranks; yields at most one difference for each.

    Args:
        seeds: of the programs.
        world_size: number of ranks.
        kind: of the programs.
        mutation: the fault that is planted in tritonddp, if any.
        compiled: whether ours is compiled.
        wrapper: the class that plays hostile programs beside stock, of :data:`in_ranks.WRAPPERS`.
    """
    left = list(seeds)
    arguments = kind, mutation, compiled, wrapper
    # A wait of a program that differs may be behind another one.
    limit = 3 * TIMEOUT + len(left) * (40 if compiled else 2 if kind == "hostile" else 15)
    with tempfile.TemporaryDirectory(prefix="tritonddp-differential-") as folder:
        while left:
            failure = ""
            try:
                run_ranks(play_all, world_size, left, folder, *arguments, timeout=limit)
            except pytest.fail.Exception as failed:
                failure = str(failed)
            while left and (played := _read(Path(folder), left[0], world_size)) is not None:
                program = program_of(kind, left.pop(0), world_size)
                what = next(_differences(program, played, compiled), None)
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


def _differences(program: Program, played: Sequence[Played], compiled: bool) -> Iterator[str]:
    """In words, ``played`` being what each rank saw."""
    beside = _beside_stock if program.is_hostile else _as_one_graph if compiled else _beside_all
    yield from beside(program, played)


def _beside_all(program: Program, played: Sequence[Played]) -> Iterator[str]:
    """The oracle, stock DDP, and other ways to play it."""
    end = len(program.actions) + 1
    if program.named and PROGRAMS[program.named].stock is None:
        for title in (OURS, LONG):
            is_same = operator.eq if program.world_size == 2 else _is_near
            yield from _compared(program, played, title, STOCK, is_same)
        return
    if IN_PLACE in played[0]:
        in_place = as_in_place(program)
        has_buffers = any(entry.kind == "buffer" for entry in played[0][IN_PLACE])
        # Buffers come to the other ranks later or sooner than in a wrapper.
        if has_buffers and program.options.syncs_buffers and not program.counts:
            traces = [each[IN_PLACE] for each in played]
            yield from Judge(in_place, IN_PLACE).differences(traces, end)
        else:
            beside = BESIDE if BESIDE in played[0] else OURS
            yield from _compared(in_place, played, IN_PLACE, beside)
    yield from Judge(program, OURS).differences([each[OURS] for each in played], end)
    if LONG in played[0]:
        yield from _compared(program, played, LONG, OURS)
    if program.is_sharded:
        yield from _beside_plain(program, played)
    elif STOCK in played[0]:
        is_sparse = "sparse embedding" in program.network.blocks  # and rounded in another order
        if program.world_size == 2 and not is_sparse:
            # (Stock sends stale gradients of frozen parameters, where they are views: rounded.)
            in_half = program.communication_hook == "fp16_compress_hook"
            is_same = partial(_is_alike, rounding=2**-24 if in_half else 0.0)
            yield from _compared(program, played, OURS, STOCK, is_same, end)
        # What stock sums in another order on three ranks goes its own way from there: that both
        # are within rounding of the oracle, step by step, says more than how far apart they end.
        yield from Judge(program, STOCK).differences([each[STOCK] for each in played], end)


def _compared(
    program: Program,
    played: Sequence[Played],
    title: str,
    other: str,
    is_same: Callable[[Entry, Entry], bool] = operator.eq,
    end: float = inf,
) -> Iterator[str]:
    """What is not the same with ``title`` as with ``other``, before an action of this number."""
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


def _beside_stock(program: Program, played: Sequence[Played]) -> Iterator[str]:
    """Bit by bit on two ranks, whose sums are the same in any order; on more of them nearly so.

    And where stock's bits are the same on all ranks, ours are.
    """
    for rank, each in enumerate(played):
        for entry in each.get(ALARM, ()):
            yield f"rank {rank}: {ALARM} says {entry.seen}"
    if program.world_size == 2:
        yield from _compared(program, played, OURS, STOCK)
    else:
        # (Where a training has diverged, numbers are what rounding has made of them.)
        diverged = (e.action for each in played for e in each[STOCK] if _is_diverged(e))
        end = min(diverged, default=inf)
        yield from _compared(program, played, OURS, STOCK, _is_near, end)
    # (Ranks that do something alone have seen more than others.)
    by_place = [
        {
            mine.place: (its.seen, mine.seen)
            for its, mine in zip(each[STOCK], each[OURS], strict=True)
        }
        for each in played
    ]
    # (Once a rank has trained by itself, numbers that are alike are so by chance.)
    actions = [getattr(each, "action", each) for each in program.actions]  # under a mode
    changed = (n for n in range(len(actions)) if _sets_ranks_apart(*actions[n:]))
    until = min(changed, default=inf)
    for place, (its, mine) in by_place[0].items():
        if place[0] >= until:
            continue
        others = [each[place] for each in by_place[1:] if place in each]
        if all(stocks == its for stocks, _ in others) and any(ours != mine for _, ours in others):
            yield f"{place} has the same bits on all ranks with stock DDP, and not here"


def _sets_ranks_apart(action: Action, *behind: Action) -> bool:
    """Whether a rank changes gradients, or parameters, by itself: if only to the last bit."""
    if isinstance(action, Probe) and action.end == "left":
        # (A backward that is reduced takes what is left with it.)
        then = (each for each in behind if isinstance(each, Step | Backward | ZeroGrad))
        return isinstance(next(then, None), Step)
    is_alone = isinstance(action, WrapAgain) and action.alone
    takes_back = isinstance(action, Probe) and action.end.startswith("stepped")
    return isinstance(action, ChangeGradients) or is_alone or takes_back


def _as_one_graph(program: Program, played: Sequence[Played]) -> Iterator[str]:
    """Beside the network alone compiled, inside of the wrapper."""
    # Where a loss leaves an output out, a graph gives zeros where parts of it give nothing.
    ends = (
        number
        for number, action in enumerate(program.actions)
        if isinstance(action, Backward) and len(action.heads) < 2
    )
    is_same = partial(_is_near, within=1e-3)  # also of what some steps have made of it
    yield from _compared(program, played, OURS, LONG, is_same, next(ends, inf))


def _beside_plain(program: Program, played: Sequence[Played]) -> Iterator[str]:
    """With the bits of the plain optimizer where they are promised, gradients on their owners."""
    title = PLAIN if PLAIN in played[0] else STOCK
    if title not in played[0]:
        return
    asked = (
        number
        for number, action in enumerate(program.actions)
        if program.world_size > 2 and isinstance(action, ReduceGradients)  # through the group
    )
    end = min([*clips_to_rounding(program), *_second_means(program), *asked], default=inf)
    shared = [
        {
            who: [e for e in each[who] if e.kind != "owner" and not _is_held(e)]
            for who in (OURS, title)
        }
        for each in played
    ]
    yield from _compared(program, shared, OURS, title, _is_alike_or_elsewhere, end)


def _is_alike_or_elsewhere(mine: Entry, its: Entry) -> bool:
    return (mine.kind == "gradient" and mine.seen is None) or _is_alike(mine, its)


def _is_alike(mine: Entry, its: Entry, rounding: float = 0.0) -> bool:
    """Of the same bits, but for the sign of a zero: to a zero that is there one may be added.

    And but for ``rounding`` of gradients.
    """
    if not isinstance(mine.seen, Snapshot) or not isinstance(its.seen, Snapshot):
        return mine.seen == its.seen
    bound = torch.tensor(rounding).double() if rounding and mine.kind == "gradient" else None
    value = Expected(its.place, its.seen.tensor(), bound, its.seen.strides)
    return mine.seen == its.seen or not _difference(mine.seen, value)[0]


def _second_means(program: Program) -> Iterator[int]:
    """Numbers of the backwards that add to a mean."""
    has_mean = False
    for number, action in enumerate(program.actions):
        if isinstance(action, Backward | ReduceGradients):
            if has_mean:
                yield number
            has_mean = isinstance(action, ReduceGradients) or not action.local
        has_mean = has_mean and not isinstance(action, ZeroGrad | Hold | BreakOff)


def _is_diverged(entry: Entry) -> bool:
    """Whether it is a parameter with NaN, or with numbers that leave no digit to others."""
    if entry.kind != "parameter" or not isinstance(entry.seen, Snapshot):
        return False
    return not bool((dense(entry.seen.tensor()).abs() < _DIVERGED).all())


def _is_held(entry: Entry) -> bool:
    return entry.name.endswith("is held")


def _is_near(mine: Entry, its: Entry, within: float | None = None) -> bool:
    """But for rounding: of sums in another order, or ``within`` this share of the largest one."""
    if mine.seen == its.seen:
        return True
    if not isinstance(mine.seen, Snapshot) or not isinstance(its.seen, Snapshot):
        return False
    if (mine.seen.dtype, mine.seen.shape) != (its.seen.dtype, its.seen.shape):
        return False
    a, b = dense(mine.seen.tensor()), dense(its.seen.tensor())
    if mine.name.startswith(READ):  # numbers in double precision, as something else
        a, b = a.view(torch.float64), b.view(torch.float64)
    if not (a.is_floating_point() or a.is_complex()):
        return False
    relative = bound = _NEAR.get(a.dtype, 1e-5)
    largest = float(b.abs().double().nan_to_num(0, 0, 0).max()) if b.numel() else 0.0
    if within is not None:
        relative = 30 * within if a.dtype.itemsize == 2 else within
        bound = relative * largest + 1e-6
    elif mine.name.startswith(PRODUCT):  # whose terms may cancel each other
        bound = relative * max(1.0, largest)
    wide = torch.complex128 if a.is_complex() else torch.float64
    return torch.allclose(a.to(wide), b.to(wide), rtol=relative, atol=bound, equal_nan=True)


class Judge:
    """Has the oracle beside what the ranks saw, action by action.

    Args:
        program: what is played.
        title: by whom.

    Attributes:
        farthest: how far a tensor has been from the oracle's at most, by what rounding allows.
    """

    def __init__(self, program: Program, title: str) -> None:
        self._program, self._title = program, title
        self._oracle = Oracle(program, in_place=title == IN_PLACE)
        self._next = 0  # action that was not judged yet
        self.farthest = 0.0

    def forget_outputs(self) -> None:
        """Those that nothing becomes of, and their graphs."""
        for player in self._oracle.players:
            player.forget_outputs()

    def differences(self, traces: Sequence[Trace], end: int) -> Iterator[str]:
        """In words, of the actions before ``end``, each from what the ranks had before it."""
        for number in range(self._next, end):
            seen = [[entry for entry in trace if entry.action == number] for trace in traces]
            yield from self._of_action(number, seen)
        self._next = end

    def _of_action(self, number: int, seen: Sequence[Sequence[Entry]]) -> Iterator[str]:
        program, title, oracle = self._program, self._title, self._oracle
        owners = [{e.name: e.seen for e in entries if e.kind == "owner"} for entries in seen]
        if any(each != owners[0] for each in owners):
            yield f"{title}: the ranks have different owners: {owners}"
        if number < len(program.actions) and isinstance(program.actions[number], Renew):
            oracle.owners = {}
        for name, rank in owners[0].items():
            oracle.owners[name] = int(rank.tensor()) if isinstance(rank, Snapshot) else -1
        seen = [[entry for entry in entries if entry.kind != "owner"] for entries in seen]
        is_end = number == len(program.actions)
        expected = oracle.finish() if is_end else oracle.perform(number)
        if title == STOCK:
            in_half = program.communication_hook == "fp16_compress_hook"
            expected = [[_loosened(each, in_half) for each in of_rank] for of_rank in expected]
        for rank, (entries, wanted) in enumerate(zip(seen, expected, strict=True)):
            places = [entry.place for entry in entries]
            if places != [each.place for each in wanted]:
                yield f"{title}, rank {rank} saw {places}, but not {[e.place for e in wanted]}"
                return
            for entry, each in zip(entries, wanted, strict=True):
                found, distance = _difference(entry.seen, each)
                self.farthest = max(self.farthest, distance)
                if found:
                    yield f"{_where(program, title, rank, entry)} {found}"
        pairs = [list(zip(*both, strict=True)) for both in zip(seen, expected, strict=True)]
        # (Whoever has inputs, or owns a gradient, may hold it.)
        pairs = [[each for each in some if not _is_held(each[0])] for some in pairs]
        for of_ranks in zip(*filter(None, pairs), strict=True):
            column, wanted = zip(*of_ranks, strict=True)
            yield from _among_ranks(program, title, column, wanted)
        oracle.adopt(seen)


def _loosened(expected: Expected, in_half: bool) -> Expected:
    """Stock takes the mean of stale gradients that nobody used too, where they are views."""
    value = expected.value
    if expected.place[1] != "gradient" or value is None or expected.bound is not None:
        return expected
    eps = max(
        torch.finfo(each).eps for each in (value.dtype, torch.half if in_half else value.dtype)
    )
    return replace(expected, bound=dense(value).abs().double() * 4 * eps + (1e-4 if in_half else 0))


def _among_ranks(
    program: Program, title: str, seen: Sequence[Entry], wanted: Sequence[Expected]
) -> Iterator[str]:
    """Where all ranks must see the same, it is the same bits."""
    contents = [entry.seen and entry.seen.content for entry in seen]
    if len({*contents}) == 1:
        return
    if len({each.value is not None and Snapshot.of(each.value).content for each in wanted}) == 1:
        yield f"{_where(program, title, 0, seen[0])} has other bits than on another rank"


def _difference(seen: Snapshot | None, expected: Expected) -> tuple[str, float]:
    """In words, empty if there is none; and how far off it is, by what rounding allows."""
    value = expected.value
    if value is None or seen is None:
        if value is seen is None:
            return "", 0.0
        return f"is {_shown(seen)}, but should be {_shown(value)}", inf
    if (seen.dtype, seen.shape) != (value.dtype, tuple(value.shape)):
        kind = f"{value.dtype} {tuple(value.shape)}"
        return f"is {seen.dtype} {seen.shape}, but should be {kind}", inf
    if (seen.strides is None) != value.is_sparse:
        return f"should {'' if value.is_sparse else 'not '}be sparse", inf
    if expected.strides is not None and _order(seen.shape, seen.strides) != _order(
        seen.shape, expected.strides
    ):
        return f"has strides {seen.strides}, but should have {expected.strides}", inf
    bound = expected.bound
    if value.is_sparse:
        bound = _loosened_for_rows(value, bound)
    tensor, value = dense(seen.tensor()), dense(value)
    same = _same(tensor, value)
    if bool(same.all()):
        return "", 0.0
    if bound is None:
        return f"is\n{_shown(tensor)}\nbut should be exactly\n{_shown(value)}\n", inf
    wide = torch.complex128 if value.is_complex() else torch.float64
    # (Of what may overflow, anything may become.)
    distance = (tensor.to(wide) - value.to(wide)).abs().masked_fill(same | bound.isposinf(), 0.0)
    share = float((distance / bound).nan_to_num(0.0).max())
    if bool((distance <= bound).all()):  # never of NaN
        return "", share
    return (
        f"is\n{_shown(tensor)}\nbut should be\n{_shown(value)}\nand is {share:.3g} times as far "
        "from it as rounding may bring it\n"
    ), inf


def _loosened_for_rows(value: Tensor, bound: Tensor | None) -> Tensor:
    """What a batch gives to one row of a sparse gradient may be added up in any order, and late."""
    largest = float(dense(value).abs().max())
    return largest * _TERMS_OF_A_ROW * torch.finfo(value.dtype).eps + (
        torch.zeros(()) if bound is None else bound
    )


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Which elements are."""
    return (a == b) | (a.isnan() & b.isnan())


def _order(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides that say where elements lie: not those of dimensions of one element."""
    if 0 in shape:
        return []
    return [stride for size, stride in zip(shape, strides, strict=True) if size > 1]


def _where(program: Program, title: str, rank: int, entry: Entry) -> str:
    name = f" of {entry.name}" if entry.name else ""
    return f"{title}, rank {rank}, {program.where(entry.action)}: {entry.kind}{name}"


def _shown(value: Snapshot | Tensor | str | None) -> str:
    """Its first elements, all digits."""
    if value is None or isinstance(value, str):
        return str(value)
    tensor = dense(value.tensor() if isinstance(value, Snapshot) else value.detach())
    elements = ", ".join(f"{each:.9g}" for each in tensor.flatten()[:8].tolist())
    more = f", ... ({tensor.numel()} elements)" if tensor.numel() > 8 else ""
    return f"{tensor.dtype} {tuple(tensor.shape)} [{elements}{more}]"
