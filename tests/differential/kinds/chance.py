"""Random choices of the generators of programs."""

import random
from collections.abc import Sequence
from typing import Any


class Chance:
    """Random choices for a seed and a number of ranks, the same on all ranks."""

    def __init__(self, seed: int, world_size: int, *more: object) -> None:
        self._seed, self._world_size = seed, world_size
        self._ranks = range(world_size)
        self._random = random.Random(" ".join(map(str, (seed, world_size, *more))))

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _maybe(self, probability: float, value: Any) -> Any:
        return value if self._chance(probability) else None

    def _one_of(self, values: Sequence[Any]) -> Any:
        return self._random.choice(values)

    def _some_ranks(self, may_be_none: bool = False) -> tuple[int, ...]:
        """One, some or all ranks."""
        drawn = [rank for rank in self._ranks if self._chance(0.5)]
        if not drawn and not may_be_none:
            drawn = [self._random.randrange(self._world_size)]
        return tuple(drawn)
