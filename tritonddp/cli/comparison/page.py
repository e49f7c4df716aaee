"""The report as one HTML file, for light and dark screens, that needs nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from tritonddp.cli.comparison.report import Comparison, findings, times
from tritonddp.cli.comparison.verdict import CONFIDENCE

# Of the rows of a step's parts, in their order.
_COLOURS = ("forward", "backward", "exposed", "rest")

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --text: #1f2328; --soft: #59636e;
  --line: #d1d9e0; --panel: #f6f8fa; --dot: #0969da; --good: #1a7f37; --bad: #cf222e;
  --rest: #afb8c1; --forward: #54aeff; --backward: #0550ae; --exposed: #cf222e }
@media (prefers-color-scheme: dark) { :root { --ground: #0d1117; --text: #e6edf3; --soft: #9198a1;
  --line: #3d444d; --panel: #151b23; --dot: #58a6ff; --good: #3fb950; --bad: #ff7b72;
  --rest: #6e7681; --forward: #79c0ff; --backward: #1f6feb; --exposed: #ff7b72 } }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 16px/1.5 -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif }
main { max-width: 920px; margin: 0 auto; padding: 24px 16px 48px }
h1 { font-size: 20px; margin: 0 0 4px } h2 { font-size: 17px; margin: 32px 0 8px }
p { margin: 8px 0 } .soft { color: var(--soft); font-size: 14px }
code { font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere }
.verdict { font-size: 20px; padding: 16px; margin: 16px 0; border-radius: 8px;
  background: var(--panel); border-left: 6px solid var(--soft) }
.verdict.faster { border-color: var(--good) } .verdict.slower { border-color: var(--bad) }
pre { white-space: pre-wrap; font: inherit; margin: 0 } .wrong { color: var(--bad) }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: 5px 8px; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
.lane { display: flex; height: 28px; border-radius: 4px; overflow: hidden; margin: 3px 0 12px }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 14px; color: var(--soft) }
.legend i { display: inline-block; width: 12px; height: 12px; margin-right: 6px }
.ratio { position: relative; height: 16px; background: var(--panel) }
.ratio i { position: absolute; top: 0; height: 16px; border-left: 2px dashed var(--soft) }
.ratio b { position: absolute; top: 3px; height: 10px; min-width: 10px; border-radius: 5px;
  background: var(--dot) }
"""


def page(comparison: Comparison) -> str:
    """The content of the file."""
    verdict = comparison.verdict
    kind = ("slower" if verdict.is_slower else "faster") if verdict.is_different else "same"
    sentence = verdict.sentence[0].upper() + verdict.sentence[1:]
    first, second = map(escape, comparison.job.labels)
    wrong = ' class="wrong"' if any(each.is_wrong for each in comparison.findings) else ""
    found = escape("\n".join(findings(comparison)))
    body = [
        f"<h1>{second} beside {first}</h1>",
        f"<p><code>{escape(comparison.command)}</code></p>",
        f'<p class="verdict {kind}">{escape(sentence)}</p><p>{escape(comparison.stopped)}</p>',
        f"<h2>Do both do the same?</h2><pre{wrong}>{found}</pre>",
        *_table(comparison),
        *_steps(comparison),
        *_ratios(comparison),
        f'<h2>How it was measured</h2><p class="soft">{escape(comparison.method())}</p>',
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{second} beside {first}</title><style>{_STYLE}</style></head>\n"
        "<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )


def _table(comparison: Comparison) -> Iterator[str]:
    header = ("", *comparison.job.labels, f"ratio ({CONFIDENCE})")
    yield '<h2>A step in figures</h2><div class="scroll"><table><tr>'
    yield "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>"
    for row in comparison.rows:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row.cells()) + "</tr>"
    yield "</table></div>"


def _steps(comparison: Comparison) -> Iterator[str]:
    """The step of both to the same scale, from the rows of its parts."""
    step, *parts = comparison.rows[: 1 + len(_COLOURS)]
    if any(part.why for part in parts):
        return
    longest = max(step.first or 0, step.second or 0)
    yield "<h2>A step and its parts</h2>"
    for which, label in zip(("first", "second"), comparison.job.labels, strict=True):
        yield f'<b>{escape(label)}</b> {getattr(step, which):.4g} ms<div class="lane">'
        for part, colour in zip(parts, _COLOURS, strict=True):
            length = getattr(part, which)
            style = f"width:{100 * length / longest:.3f}%;background:var(--{colour})"
            yield f'<div style="{style}" title="{escape(part.label)}: {length:.3g} ms"></div>'
        yield "</div>"
    yield '<div class="legend">'
    for part, colour in zip(parts, _COLOURS, strict=True):
        yield f'<span><i style="background:var(--{colour})"></i>{escape(part.label)}</span>'
    yield "</div>"


def _ratios(comparison: Comparison) -> Iterator[str]:
    """The ratio of each launch as a dot, and that of all as a bar as long as its interval."""
    whole = comparison.verdict.ratio
    ratios = [math.exp(each.second - each.first) for each in times(comparison.launches)]
    low, high = max(whole.low, 0.25), min(whole.high, 4.0)
    left, right = min(0.95, low, *ratios), max(1.05, high, *ratios)

    def at(ratio: float) -> float:
        return 96 * (ratio - left) / (right - left) + 1

    yield "<h2>The ratio, launch by launch, and its interval</h2>"
    for begin, end in [*((each, each) for each in ratios), (low, high)]:
        place = f"left:{at(begin):.2f}%;width:{at(end) - at(begin):.2f}%"
        yield f'<div class="ratio"><i style="left:{at(1):.2f}%"></i><b style="{place}"></b></div>'
    yield (
        f'<p class="soft">From {left:.3f} to {right:.3f}. The bar is the interval of all launches '
        f"({CONFIDENCE}), the dashed line 1: no difference.</p>"
    )
