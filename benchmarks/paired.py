"""Statistics of interleaved rounds: medians, quartiles, and paired ratios with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

RESAMPLES = 4000


@dataclass(frozen=True)
class Spread:
    """First quartile, median and third quartile."""

    q1: float
    median: float
    q3: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        values = torch.tensor(samples, dtype=torch.float64)
        q1, median, q3 = torch.quantile(values, torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
        return cls(q1, median, q3)


@dataclass(frozen=True)
class Ratio:
    """A median over rounds, with its 95% bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f} {self.high:.3f}]"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """The median over rounds of the ratio of two samples of one round.

    What slows a whole round down, a neighbour on the machine say, cancels. The interval is the
    percentile bootstrap over rounds, which takes them as independent: it does not know what stays
    the same within a process, such as where memory happened to lie.
    """
    values = torch.tensor(numerators, dtype=torch.float64) / torch.tensor(
        denominators, dtype=torch.float64
    )
    picks = torch.randint(
        len(values), (RESAMPLES, len(values)), generator=torch.Generator().manual_seed(0)
    )
    medians = torch.quantile(values[picks], 0.5, dim=1)
    low, high = torch.quantile(medians, torch.tensor([0.025, 0.975]).double()).tolist()
    return Ratio(torch.quantile(values, 0.5).item(), low, high)
