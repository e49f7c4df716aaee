"""What convergence.py has found: how final losses compare, as data and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

HEADER = (
    "task",
    "wire",
    "sent a step, kB",
    "final held-out loss",
    "of the seeds",
    "minus fp32's of the same seed",
    "mean against fp32's seeds",
)
_VERDICTS = {
    "within": "within the spread",
    "below": "below the spread",
    "above": "**above the spread**",
    None: "-",
}


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


def rows(tasks: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Of each task one row a wire; losses in nats per target."""
    for name, task in tasks.items():
        for wire, one in task["comparisons"].items():
            away = one["differences"]
            against = f"{mean(away):+.4f} ({min(away):+.4f} to {max(away):+.4f})"
            yield (
                name,
                wire,
                f"{task['sent_bytes'][wire] / 1e3:.0f}",
                f"{one['mean']:.4f}",
                f"{one['low']:.4f} to {one['high']:.4f}",
                "-" if one["verdict"] is None else against,
                _VERDICTS[one["verdict"]],
            )


def notes(tasks: Mapping[str, Any]) -> Iterator[str]:
    """What was trained, and that the ranks agreed: a sentence a task."""
    for name, task in tasks.items():
        yield (
            f"{name}: {task['parameters']:,} parameters, {task['steps']:,} steps of "
            f"{task['batch_size']} samples per rank, {task['optimizer']}; "
            f"held out {task['held_out_targets']:,} {task['target']}s. All ranks held the same "
            f"bits after each of {task['same_bits_after_steps']:,} steps of each wire."
        )


def lines(tasks: Mapping[str, Any]) -> Iterator[str]:
    """The table for a terminal."""
    table = [HEADER, *rows(tasks)]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADER))]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
