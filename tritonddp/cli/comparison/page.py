"""The report as a self-contained HTML file, for light and dark screens."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from html import escape

from tritonddp.cli.comparison.report import Comparison, findings, last_words
from tritonddp.cli.comparison.verdict import CONFIDENCE

# Colors of the parts of a step, in the order of the rows.
_COLOURS = ("forward", "backward", "exposed", "rest")

_STYLE = """
:root { color-scheme: light dark;
  --forward: #54aeff; --backward: #1f6feb; --exposed: #cf222e; --rest: #8c959f }
body { margin: 0; font: 16px/1.5 -apple-system, "Segoe UI", "Noto Sans", Helvetica, sans-serif }
main { max-width: 920px; margin: 0 auto; padding: 24px 16px 48px }
h1 { font-size: 20px; margin: 0 0 4px } h2 { font-size: 17px; margin: 32px 0 8px }
p { margin: 8px 0 } .soft { opacity: 0.7; font-size: 14px }
code { font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere }
.verdict { font-size: 20px; padding: 16px; margin: 16px 0; border-radius: 8px;
  background: #8882; border-left: 6px solid #888 }
.verdict.faster { border-color: #2da44e } .verdict.slower { border-color: #cf222e }
pre { white-space: pre-wrap; font: inherit; margin: 0 } .wrong { color: #e5484d }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
td { text-align: right; padding: 5px 8px; border-bottom: 1px solid #8884 }
td:first-child { text-align: left; padding-left: 0 } tr:first-child { font-weight: bold }
.lane { display: flex; height: 28px; border-radius: 4px; overflow: hidden; margin: 3px 0 12px }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 14px }
.legend i { display: inline-block; width: 12px; height: 12px; margin-right: 6px }
.ratio { position: relative; height: 16px; background: #8882 }
.ratio i { position: absolute; top: 0; height: 16px; border-left: 2px dashed #888 }
.ratio b { position: absolute; top: 3px; height: 10px; min-width: 10px; border-radius: 5px;
  background: #1f6feb }
"""


def page(comparison: Comparison) -> str:
    """Return the content of the file."""
    ratio = comparison.ratio
    kind = "same"
    if comparison.is_ours_alone_right is not None:
        kind = "faster" if comparison.is_ours_alone_right else "slower"
    elif ratio is not None and ratio.is_different:
        kind = "slower" if ratio.is_slower else "faster"
    first, second = map(escape, comparison.launches.labels)
    wrong = ' class="wrong"' if any(each.is_wrong for each in comparison.findings) else ""
    found = escape("\n".join(findings(comparison)))
    body = [
        f"<h1>{second} compared with {first}</h1>",
        f"<p><code>{escape(shlex.join(['tritonddp', *sys.argv[1:]]))}</code></p>",
        f'<p class="verdict {kind}">{escape(" ".join(comparison.sentences))}</p>'
        f"<p>{escape(comparison.stopped)}</p>"
        f"<pre>{escape(chr(10).join(last_words(comparison)))}</pre>",
        f"<h2>Correctness</h2><pre{wrong}>{found}</pre>",
        '<h2>Step times</h2><div class="scroll"><table>',
        *("<tr><td>" + "<td>".join(map(escape, cells)) for cells in comparison.table),
        "</table></div>",
        *_steps(comparison),
        *_ratios(comparison),
        f'<h2>Method</h2><p class="soft">{escape(comparison.method())}</p>',
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{second} compared with {first}</title><style>{_STYLE}</style></head>\n"
        "<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )


def _steps(comparison: Comparison) -> Iterator[str]:
    """Draw the steps of both contenders to the same scale, from the rows of the parts."""
    rows = comparison.rows[: 1 + len(_COLOURS)]
    if any(row.first is None for row in rows) or len(rows) <= len(_COLOURS):
        return
    step, *parts = rows
    longest = max(step.first or 0, step.second or 0)
    yield "<h2>Parts of a step</h2>"
    for which, label in zip(("first", "second"), comparison.launches.labels, strict=True):
        yield f'<b>{escape(label)}</b> {getattr(step, which):.4g} ms<div class="lane">'
        for part, color in zip(parts, _COLOURS, strict=True):
            length = getattr(part, which)
            style = f"width:{100 * length / longest:.3f}%;background:var(--{color})"
            yield f'<div style="{style}" title="{escape(part.label)}: {length:.3g}"></div>'
        yield "</div>"
    yield '<div class="legend">'
    for part, color in zip(parts, _COLOURS, strict=True):
        yield f'<span><i style="background:var(--{color})"></i>{escape(part.label)}</span>'
    yield "</div>"


def _ratios(comparison: Comparison) -> Iterator[str]:
    """Draw the ratio of each launch as a dot, and the overall interval as a bar."""
    whole = comparison.ratio
    if whole is None:
        return
    ratios = [each.second / each.first for each in comparison.launches.times]
    low, high = max(whole.low, 0.25), min(whole.high, 4.0)
    left, right = min(0.95, low, *ratios), max(1.05, high, *ratios)

    def at(ratio: float) -> float:
        return 96 * (ratio - left) / (right - left) + 1

    yield "<h2>Ratios of the launches, and confidence interval</h2>"
    for begin, end in [*((each, each) for each in ratios), (low, high)]:
        place = f"left:{at(begin):.2f}%;width:{at(end) - at(begin):.2f}%"
        yield f'<div class="ratio"><i style="left:{at(1):.2f}%"></i><b style="{place}"></b></div>'
    yield (
        f'<p class="soft">From {left:.3f} to {right:.3f}. The bar is the {CONFIDENCE} interval '
        "over all launches. The dashed line marks 1 (no difference).</p>"
    )
