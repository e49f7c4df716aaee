"""How the final losses of several seeds compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any


def compared(losses: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, dict[str, Any]]:
    """Final losses of all wires against those of the first one.

    Args:
        losses: by wire, of each seed the losses at all evaluations.

    Returns:
        By wire the final losses' ``mean``, ``low`` and ``high`` over the seeds, their
        ``differences`` from the first wire's with the same seed, and the ``verdict``: whether the
        mean lies ``"within"`` the first wire's losses of all seeds, ``"below"`` or ``"above"``
        them. A mean that is no number is above.
    """
    finals = {wire: [curve[-1] for curve in curves] for wire, curves in losses.items()}
    first, reference = next(iter(finals.items()))
    low, high = min(reference), max(reference)
    return {
        wire: {
            "mean": mean(each),
            "low": min(each),
            "high": max(each),
            "differences": [a - b for a, b in zip(each, reference, strict=True)],
            "verdict": None if wire == first else _verdict(mean(each), low, high),
        }
        for wire, each in finals.items()
    }


def _verdict(value: float, low: float, high: float) -> str:
    if value < low:
        return "below"
    return "within" if value <= high else "above"
