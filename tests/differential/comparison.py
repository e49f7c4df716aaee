"""A scenario judged: by the oracle, by stock DDP, and by what the other ranks saw."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import pytest
import torch
from distributed import run_ranks
from torch import Tensor

from differential.generator import scenario_of
from differential.in_ranks import (
    ALL,
    BESIDE,
    COMPILED,
    IN_PLACE,
    IN_PLACE_ALONE,
    LONG,
    OURS,
    PLAIN,
    STOCK,
    Played,
    as_in_place,
    build,
    play_all,
)
from differential.oracle import Expected, Oracle
from differential.scenario import (
    Backward,
    BreakOff,
    Hold,
    ReduceGradients,
    Renew,
    Scenario,
    ZeroGrad,
)
from differential.trace import Entry, Snapshot, Trace, dense

# More than a batch of these networks gives to a row.
_TERMS_OF_A_ROW = 64


@dataclass(frozen=True)
class Difference:
    """What a scenario has brought to light."""

    scenario: Scenario
    what: str

    def __str__(self) -> str:
        return f"{self.what}\n{self.scenario}\nTo play it again: {self.scenario.command}"


def differences(
    seeds: Sequence[int],
    world_size: int,
    mutation: str | None = None,
    timeout: float = 60,
    ways: str = ALL,
    kind: str = "usual",
) -> Iterator[Difference]:
    """Play scenarios on ``world_size`` ranks; yields at most one difference for each.

    Args:
        seeds: of the scenarios.
        world_size: number of ranks.
        mutation: the fault that is planted in tritonddp, if any.
        timeout: for all of them, in seconds.
        ways: in which they are played.
        kind: of the scenarios.
    """
    arguments = mutation, ways, kind
    try:
        played = run_ranks(play_all, world_size, list(seeds), *arguments, timeout=timeout)
    except pytest.fail.Exception as failure:
        if len(seeds) == 1 or mutation is not None:
            yield Difference(scenario_of(seeds[0], world_size, kind=kind), str(failure))
            return
        alone = [
            each
            for seed in seeds
            for each in differences([seed], world_size, mutation, timeout, ways, kind)
        ]
        yield from alone
        if not alone:
            what = (
                f"only if seeds {list(seeds)} are played in this order by one process:\n{failure}"
            )
            yield Difference(scenario_of(seeds[-1], world_size, kind=kind), what)
        return
    for seed, *of_ranks in zip(seeds, *played, strict=True):
        scenario = scenario_of(seed, world_size, kind=kind)
        what = next(_differences(scenario, of_ranks, ways), None)
        if what is not None:
            yield Difference(scenario, what)


def _differences(scenario: Scenario, played: Sequence[Played], ways: str) -> Iterator[str]:
    """In words, ``played`` being what each rank saw."""
    if ways == COMPILED:
        # Where a loss leaves an output out, a graph gives zeros where parts of it give nothing.
        ends = (
            number
            for number, action in enumerate(scenario.actions)
            if isinstance(action, Backward) and len(action.heads) < 2
        )
        end = next(ends, len(scenario.actions) + 1)
        for rank, each in enumerate(filter(None, played)):
            for mine, inside in zip(each[OURS], each[LONG], strict=True):
                if mine.action < end and not _is_near(mine.seen, inside.seen):
                    yield (
                        f"{_where(scenario, 'as one graph', rank, mine)} is {_shown(mine.seen)}, "
                        f"inside {_shown(inside.seen)}"
                    )
        return
    if IN_PLACE in played[0]:
        yield from _in_place(scenario, played)
    if ways == IN_PLACE_ALONE:
        return
    end = len(scenario.actions) + 1
    yield from Judge(scenario, OURS).differences([each[OURS] for each in played], end)
    for rank, each in enumerate(played):
        for mine, long in zip(each[OURS], each.get(LONG, each[OURS]), strict=True):
            if mine != long:
                yield f"{_where(scenario, LONG, rank, long)} has other bits than with all prepared"
    if scenario.is_sharded:
        for rank, each in enumerate(played):
            yield from _from_plain(scenario, rank, each)
        return
    if STOCK not in played[0]:
        return
    is_sparse = "sparse embedding" in scenario.network.blocks  # and rounded in another order
    for rank, each in enumerate(played):
        if scenario.world_size == 2 and not is_sparse:
            yield from _from_stock(scenario, rank, each[OURS], each[STOCK])
    # What stock sums in another order on three ranks goes its own way from there: that both are
    # within rounding of the oracle, step by step, says more than how far apart they end.
    yield from Judge(scenario, STOCK).differences([each[STOCK] for each in played], end)


def _in_place(scenario: Scenario, played: Sequence[Played]) -> Iterator[str]:
    """With the bits of the wrapper, but where buffers come to the other ranks later or sooner."""
    in_place = as_in_place(scenario)
    has_buffers = any(entry.kind == "buffer" for entry in played[0][IN_PLACE])
    if has_buffers and scenario.options.syncs_buffers and not scenario.counts:
        end = len(scenario.actions) + 1
        yield from Judge(in_place, IN_PLACE).differences([each[IN_PLACE] for each in played], end)
        return
    for rank, each in enumerate(played):
        for ours, mine in zip(each.get(BESIDE, each[OURS]), each[IN_PLACE], strict=True):
            if ours != mine:
                yield (
                    f"{_where(in_place, IN_PLACE, rank, mine)} is {_shown(mine.seen)}, and "
                    f"{_shown(ours.seen)} in a wrapper"
                )


def _is_held(entry: Entry) -> bool:
    return entry.name.endswith("is held")


def _is_near(one: Snapshot | None, other: Snapshot | None) -> bool:
    """But for rounding: graphs that are cut in other places add up in other orders."""
    if one is None or other is None:
        return one is other
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    a, b = dense(one.tensor()), dense(other.tensor())
    if not a.numel() or not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    relative = 3e-2 if a.dtype.itemsize == 2 else 1e-3  # also of what some steps have made of it
    bound = relative * float(b.abs().double().nan_to_num(0, 0, 0).max()) + 1e-6
    wide = torch.complex128 if a.is_complex() else torch.float64
    return torch.allclose(a.to(wide), b.to(wide), rtol=relative, atol=bound, equal_nan=True)


class Judge:
    """Has the oracle beside what the ranks saw, action by action.

    Args:
        scenario: what is played.
        title: by whom.

    Attributes:
        farthest: how far a tensor has been from the oracle's at most, by what rounding allows.
        exact, rounded: tensors with the oracle's bits, and others.
    """

    def __init__(self, scenario: Scenario, title: str) -> None:
        self._scenario, self._title = scenario, title
        networks = [build(scenario, 0) for _ in range(scenario.world_size)]
        self._oracle = Oracle(scenario, networks, in_place=title == IN_PLACE)
        self._next = 0  # action that was not judged yet
        self.farthest = 0.0
        self.exact = self.rounded = 0

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
        scenario, title, oracle = self._scenario, self._title, self._oracle
        owners = [{e.name: e.seen for e in entries if e.kind == "owner"} for entries in seen]
        if any(each != owners[0] for each in owners):
            yield f"{title}: the ranks have different owners: {owners}"
        if number < len(scenario.actions) and isinstance(scenario.actions[number], Renew):
            oracle.owners = {}
        for name, rank in owners[0].items():
            oracle.owners[name] = int(rank.tensor()) if rank is not None else -1
        seen = [[entry for entry in entries if entry.kind != "owner"] for entries in seen]
        is_end = number == len(scenario.actions)
        expected = oracle.finish() if is_end else oracle.perform(number)
        if title == STOCK:
            in_half = scenario.communication_hook == "fp16_compress_hook"
            expected = [[_loosened(each, in_half) for each in of_rank] for of_rank in expected]
        for rank, (entries, wanted) in enumerate(zip(seen, expected, strict=True)):
            places = [entry.place for entry in entries]
            if places != [each.place for each in wanted]:
                yield f"{title}, rank {rank} saw {places}, but not {[e.place for e in wanted]}"
                return
            for entry, each in zip(entries, wanted, strict=True):
                found, distance = _difference(entry.seen, each)
                self.farthest = max(self.farthest, distance)
                self.exact, self.rounded = (
                    self.exact + (distance == 0),
                    self.rounded + (distance > 0),
                )
                if found:
                    yield f"{_where(scenario, title, rank, entry)} {found}"
        pairs = [list(zip(*both, strict=True)) for both in zip(seen, expected, strict=True)]
        if scenario.is_sharded:  # who owns a gradient may hold it
            pairs = [[each for each in some if not _is_held(each[0])] for some in pairs]
        for of_ranks in zip(*filter(None, pairs), strict=True):
            column, wanted = zip(*of_ranks, strict=True)
            yield from _among_ranks(scenario, title, column, wanted)
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


def _from_plain(scenario: Scenario, rank: int, played: Played) -> Iterator[str]:
    """With the bits of the plain optimizer where they are promised, gradients on their owners."""
    title = PLAIN if PLAIN in played else STOCK
    if title not in played:
        return
    asked = (
        number
        for number, action in enumerate(scenario.actions)
        if scenario.world_size > 2 and isinstance(action, ReduceGradients)  # through the group
    )
    ends = [*scenario.clips_by_its_own_norm, *_second_means(scenario), *asked]
    end = min([*ends, len(scenario.actions) + 1])
    ours, plain = (
        [
            entry
            for entry in played[each]
            if entry.action < end and entry.kind != "owner" and not _is_held(entry)
        ]
        for each in (OURS, title)
    )
    for mine, its in zip(ours, plain, strict=True):
        is_elsewhere = mine.kind == "gradient" and mine.seen is None
        if not is_elsewhere and not _is_alike(mine.seen, its.seen):
            yield (
                f"{_where(scenario, OURS, rank, mine)} is {_shown(mine.seen)}, and with a plain "
                f"optimizer ({title}) it is {_shown(its.seen)}"
            )


def _is_alike(one: Snapshot | None, other: Snapshot | None) -> bool:
    """Of the same bits, but for the sign of a zero: to a zero that is there one may be added."""
    if one == other or one is None or other is None:
        return one == other
    return one.strides == other.strides and _same(one.tensor(), other.tensor())


def _second_means(scenario: Scenario) -> Iterator[int]:
    """Numbers of the backwards that add to a mean."""
    has_mean = False
    for number, action in enumerate(scenario.actions):
        if isinstance(action, Backward | ReduceGradients):
            if has_mean:
                yield number
            has_mean = isinstance(action, ReduceGradients) or not action.local
        has_mean = has_mean and not isinstance(action, ZeroGrad | Hold | BreakOff)


def _from_stock(scenario: Scenario, rank: int, ours: Trace, stock: Trace) -> Iterator[str]:
    """Bit for bit, up to where each clips by a norm of its own."""
    end = min(scenario.clips_by_its_own_norm, default=len(scenario.actions) + 1)
    ours, stock = ([each for each in trace if each.action < end] for trace in (ours, stock))
    for mine, its in zip(ours, stock, strict=True):
        value = None if its.seen is None else its.seen.tensor()
        strides = None if its.seen is None else its.seen.strides
        found, _ = _difference(mine.seen, Expected(its.place, value, None, strides))
        if found:
            yield f"{_where(scenario, OURS, rank, mine)} {found} (which is what stock DDP has)"


def _among_ranks(
    scenario: Scenario, title: str, seen: Sequence[Entry], wanted: Sequence[Expected]
) -> Iterator[str]:
    """Where all ranks must see the same, it is the same bits."""
    contents = [entry.seen and entry.seen.content for entry in seen]
    if len({*contents}) == 1:
        return
    if len({each.value is not None and Snapshot.of(each.value).content for each in wanted}) == 1:
        yield f"{_where(scenario, title, 0, seen[0])} has other bits than on another rank"


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
    if _same(tensor, value):
        return "", 0.0
    if bound is None:
        return f"is\n{_shown(tensor)}\nbut should be exactly\n{_shown(value)}\n", inf
    wide = torch.complex128 if value.is_complex() else torch.float64
    distance = (tensor.to(wide) - value.to(wide)).abs()
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


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _order(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides that say where elements lie: not those of dimensions of one element."""
    if 0 in shape:
        return []
    return [stride for size, stride in zip(shape, strides, strict=True) if size > 1]


def _where(scenario: Scenario, title: str, rank: int, entry: Entry) -> str:
    number = entry.action
    action = [*scenario.actions, "the end"][number]
    name = f" of {entry.name}" if entry.name else ""
    return f"{title}, rank {rank}, after action {number} ({action}): {entry.kind}{name}"


def _shown(value: Snapshot | Tensor | None) -> str:
    """Its first elements, all digits."""
    if value is None:
        return "None"
    tensor = dense(value.tensor() if isinstance(value, Snapshot) else value.detach())
    elements = ", ".join(f"{each:.9g}" for each in tensor.flatten()[:8].tolist())
    more = f", ... ({tensor.numel()} elements)" if tensor.numel() > 8 else ""
    return f"{tensor.dtype} {tuple(tensor.shape)} [{elements}{more}]"
