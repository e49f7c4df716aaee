"""What has come of a list of seeds: at most one difference for each."""

import pickle
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from distributed import run_ranks

from differential.hostile.generator import program_of
from differential.hostile.in_ranks import OURS, STOCK, Played, play_all
from differential.hostile.program import Program

# Seconds after which ranks give each other up; a program takes a tenth of one.
_TIMEOUT = 20.0


@dataclass(frozen=True)
class Difference:
    """What a program has brought to light.

    Attributes:
        program: that did.
        what: in words.
        is_stocks: whether stock DDP itself has failed: then the generator is wrong.
    """

    program: Program
    what: str
    is_stocks: bool = False

    def __str__(self) -> str:
        return f"{self.what}\n{self.program}\nTo play it again: {self.program.command}"


def hostile_differences(
    seeds: Sequence[int], world_size: int, timeout: float = _TIMEOUT, wrapper: str = OURS
) -> Iterator[Difference]:
    """Play programs on ``world_size`` ranks with both classes.

    Args:
        seeds: of the programs.
        world_size: number of ranks.
        timeout: of process groups, in seconds.
        wrapper: the class that stock is compared with, of :data:`in_ranks.WRAPPERS`.
    """
    left = list(seeds)
    with tempfile.TemporaryDirectory(prefix="tritonddp-hostile-") as folder:
        while left:
            failure = ""
            # A wait of a program that differs may be behind another one.
            limit = 3 * timeout + 2.0 * len(left)
            try:
                run_ranks(play_all, world_size, left, folder, timeout, wrapper, timeout=limit)
            except pytest.fail.Exception as failed:
                failure = str(failed)
            while left:
                played = _read(Path(folder), left[0], world_size)
                if played is None:
                    break
                seed = left.pop(0)
                what = _difference(played)
                if what:
                    yield Difference(program_of(seed, world_size), what)
            if failure and left:
                seed = left.pop(0)
                yield Difference(
                    program_of(seed, world_size), failure, f"seed {seed}: {STOCK} raised" in failure
                )


def _read(folder: Path, seed: int, world_size: int) -> list[Played] | None:
    """What each rank has written, if all have."""
    paths = [folder / f"{seed}.{rank}" for rank in range(world_size)]
    if not all(path.exists() for path in paths):
        return None
    return [pickle.loads(path.read_bytes()) for path in paths]


def _difference(played: Sequence[Played]) -> str:
    found = [each.difference for each in played if each.difference]
    if found:
        return found[0]
    # (Ranks that do something alone have seen more than others.)
    by_rank = [{what: pair for what, *pair in each.digests} for each in played]
    for what, (its, mine) in by_rank[0].items():
        others = [each[what] for each in by_rank[1:] if what in each]
        if all(other[0] == its for other in others) and any(other[1] != mine for other in others):
            return f"{what} has the same bits on all ranks with {STOCK}, and not here"
    return ""
