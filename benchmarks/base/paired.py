"""Statistics of interleaved rounds: medians, quartiles, and paired ratios with an interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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

    @property
    def away(self) -> float:
        """The factor between 1 and the farther end of the interval; at least 1."""
        return max(self.high, 1 / self.low)

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f} {self.high:.3f}]"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Return the median over rounds of the ratio of two samples of the same round.

    A disturbance that slows a whole round, such as another process on the machine, cancels. The
    interval is the percentile bootstrap over rounds, which assumes that rounds are independent. It
    does not cover effects that are constant within a process, such as the memory layout.
    """
    return _bootstrap(lambda rounds: _median(rounds[0] / rounds[1]), numerators, denominators)


def overhead_ratio(
    numerators: Sequence[float], denominators: Sequence[float], bare: Sequence[float]
) -> Ratio:
    """Return the ratio of the median times in excess of ``bare``, with its bootstrap interval.

    This is not the median of ratios, because a difference may be near zero in a single round.
    """
    return _bootstrap(
        lambda rounds: _median(rounds[0] - rounds[2]) / _median(rounds[1] - rounds[2]),
        numerators,
        denominators,
        bare,
    )


def _bootstrap(statistic: Callable[[Tensor], Tensor], *samples: Sequence[float]) -> Ratio:
    """Return a statistic of samples that are paired by round, with its interval.

    ``statistic`` reduces tensors of shape ``(samples, ..., rounds)`` to ``(...)``.
    """
    values = torch.tensor(samples, dtype=torch.float64)
    count = values.shape[1]
    picks = torch.randint(count, (RESAMPLES, count), generator=torch.Generator().manual_seed(0))
    resampled = statistic(values[:, picks])
    low, high = torch.quantile(resampled, torch.tensor([0.025, 0.975]).double()).tolist()
    return Ratio(statistic(values).item(), low, high)


def _median(values: Tensor) -> Tensor:
    return torch.quantile(values, 0.5, dim=-1)
