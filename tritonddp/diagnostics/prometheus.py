"""``metrics()`` in the text format of Prometheus.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/. Names follow
https://prometheus.io/docs/practices/naming/: base units, seconds and bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)

# For each key of metrics(): the name without prefix, which ends with its unit, and the help text.
_SAMPLES = {
    "step": ("steps_total", "Reductions so far."),
    "step_ms": ("step_seconds", "Length of a step, mean over the ranks."),
    "input_ms": ("input_seconds", "Of a step: data, optimizer, and the rest."),
    "forward_ms": ("forward_seconds", "Of a step: forward and loss."),
    "backward_ms": ("backward_seconds", "Of a step: backward."),
    "exposed_ms": ("exposed_seconds", "Of a step: synchronisation that nothing hid."),
    "contended_ms": ("contended_seconds", "Of a step: waiting for a core."),
    "skew_ms": ("skew_seconds", "By which the slowest rank is ready later than the fastest."),
    "sent_bytes": ("sent_bytes", "Sent by this rank in the last step."),
    "slowest_rank": ("slowest_rank", "The rank that the others wait for, if any."),
    "slowest_by": ("slowest_ratio", "Of a step, by which that rank is slower."),
    "slowest_phase": ("slowest_phase", "Part of the step in which it is slower."),
}
_WORD = "phase"  # the label that holds a value which is a word; the value of the sample is 1 then


def prometheus_text(
    metrics: Mapping[str, float | int | str | None], labels: Mapping[str, str] | None = None
) -> str:
    """Write what :meth:`tritonddp.DistributedDataParallel.metrics` returned for Prometheus.

    Names begin with ``tritonddp_``: ``step_ms`` becomes ``tritonddp_step_seconds``. Left out are
    values that are ``None`` and keys that are not known here.

    Args:
        metrics: milliseconds, bytes, shares of 1 and words, by key.
        labels: labels for all samples, such as job and rank.

    Raises:
        ValueError: a label has a name that Prometheus does not allow, or that this module uses.

    Example::

        from tritonddp.diagnostics.prometheus import prometheus_text

        model = tritonddp.DistributedDataParallel(module, metrics=True)
        loss_function(model(inputs), targets).backward()
        text = prometheus_text(model.metrics(), {"rank": str(rank)})
    """
    given = {name: str(value) for name, value in (labels or {}).items()}
    for name in given:
        if not isinstance(name, str) or not _LABEL.fullmatch(name) or name == _WORD:
            raise ValueError(f"{name!r} cannot be a label of tritonddp's metrics")
    lines = []
    for key, value in metrics.items():
        if value is None or key not in _SAMPLES:
            continue
        name, text = _SAMPLES[key]
        if isinstance(value, str):
            number, own = "1", {**given, _WORD: value}
        else:
            divisor = 1000 if name.endswith("_seconds") else 1
            number, own = _number(float(value) / divisor), given
        name = f"tritonddp_{name}"
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in own.items())
        lines += [
            f"# HELP {name} {text}",
            f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}",
            f"{name}{f'{{{inside}}}' if inside else ''} {number}",
        ]
    return "".join(f"{line}\n" for line in lines)


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
