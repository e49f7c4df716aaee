"""The report as one HTML file with its pictures inside, for light and dark screens.

What has words in it is HTML, so that it stays readable on a phone; only dots and lines are SVG.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape

from tritonddp.cli.comparison.report import Comparison, mean_step, statements
from tritonddp.cli.comparison.verdict import CONFIDENCE, Launch, Ratio

_PARTS = (
    ("around", "input, optimizer and the rest"),
    ("forward", "forward"),
    ("backward", "backward, its computation"),
    ("exposed", "exposed synchronisation"),
)
_SHOWN = 0.98  # of the blocks; slower ones are drawn at the upper edge

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --text: #1f2328; --soft: #59636e;
  --line: #d1d9e0; --panel: #f6f8fa; --first: #bc4c00; --second: #0969da; --good: #1a7f37;
  --bad: #cf222e; --around: #afb8c1; --forward: #54aeff; --backward: #0550ae;
  --exposed: #cf222e; --exchange: #8250df }
@media (prefers-color-scheme: dark) { :root { --ground: #0d1117; --text: #e6edf3; --soft: #9198a1;
  --line: #3d444d; --panel: #151b23; --first: #f0883e; --second: #58a6ff; --good: #3fb950;
  --bad: #ff7b72; --around: #6e7681; --forward: #79c0ff; --backward: #1f6feb;
  --exposed: #ff7b72; --exchange: #bc8cff } }
* { box-sizing: border-box }
body { margin: 0; background: var(--ground); color: var(--text); line-height: 1.5;
  font: 16px/1.5 -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif }
main { max-width: 920px; margin: 0 auto; padding: 24px 16px 48px }
h1 { font-size: 20px; margin: 0 0 4px } h2 { font-size: 17px; margin: 32px 0 8px }
p { margin: 8px 0 } .soft { color: var(--soft); font-size: 14px }
code { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  overflow-wrap: anywhere }
.verdict { font-size: 20px; line-height: 1.4; padding: 16px; margin: 16px 0; border-radius: 8px;
  background: var(--panel); border-left: 6px solid var(--soft) }
.verdict.faster { border-color: var(--good) } .verdict.slower { border-color: var(--bad) }
.scroll { overflow-x: auto } ul { padding-left: 20px; margin: 8px 0 }
.wrong { color: var(--bad); font-weight: 600 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: 5px 8px; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left; padding-left: 0 } th { color: var(--soft);
  font-weight: 600; font-size: 14px }
.step { margin: 12px 0 } .lane { display: flex; height: 28px; border-radius: 4px;
  overflow: hidden; margin: 3px 0 } .lane.thin { height: 10px }
.lane div { min-width: 0 } .legend { display: flex; flex-wrap: wrap; gap: 4px 16px;
  font-size: 14px; color: var(--soft) } .legend i { display: inline-block; width: 12px;
  height: 12px; border-radius: 3px; margin-right: 6px; vertical-align: -1px }
.plot { position: relative; border: 1px solid var(--line); border-radius: 6px;
  background: var(--panel) } .plot svg { display: block; width: 100% }
.ends { display: flex; justify-content: space-between; gap: 8px }
"""


def page(comparison: Comparison) -> str:
    """The content of the file."""
    verdict = comparison.verdict()
    kind = ("slower" if verdict.is_slower else "faster") if verdict.is_different else "same"
    sentence = verdict.sentence[0].upper() + verdict.sentence[1:]
    first, second = comparison.labels
    body = [
        f"<h1>{escape(second)} beside {escape(first)}</h1>",
        f"<p><code>{escape(comparison.command)}</code></p>",
        f'<p class="verdict {kind}">{escape(sentence)}</p>',
        *_correctness(comparison),
        *_table(comparison),
        *_steps(comparison),
        *_ratios(comparison, verdict.ratio),
        *_strip(comparison),
        "<h2>How it was measured</h2>",
        f"<p>{escape(comparison.method())}. The first step of a block is not counted. The "
        f"interval is Student's over the means of the launches ({CONFIDENCE}); only a difference "
        "beyond 2 % whose interval leaves out 1 is called one.</p>",
        f'<p class="soft">{escape(comparison.machine())}; {comparison.seconds:.0f} s.</p>',
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(second)} beside {escape(first)}</title><style>{_STYLE}</style></head>\n"
        "<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )


def _correctness(comparison: Comparison) -> Iterator[str]:
    yield "<h2>Do both do the same?</h2><ul>"
    if not comparison.findings:
        yield "<li>Not known: no optimizer was seen.</li>"
    for finding in comparison.findings:
        style = ' class="wrong"' if finding.is_wrong else ""
        lines = "<br>".join(escape(line.strip()) for line in statements(finding))
        yield f"<li{style}>{lines}</li>"
    yield "</ul>"


def _table(comparison: Comparison) -> Iterator[str]:
    header = ("", *comparison.labels, f"ratio ({CONFIDENCE})")
    yield '<h2>A step in figures</h2><div class="scroll"><table><tr>'
    yield "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>"
    for row in comparison.rows():
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row.cells()) + "</tr>"
    yield "</table></div>"


def _steps(comparison: Comparison) -> Iterator[str]:
    """The mean step of both to the same scale: what the rank does, and below it the exchange."""
    steps = [mean_step(comparison.launches, which) for which in (0, 1)]
    if any("forward" not in step for step in steps):
        return
    longest = max(_extent(step) for step in steps)
    yield "<h2>The mean step</h2>"
    for label, step in zip(comparison.labels, steps, strict=True):
        yield f'<div class="step"><div><b>{escape(label)}</b> {1e3 * step["step"]:.3g} ms</div>'
        yield '<div class="lane">'
        for name, title in _PARTS:
            yield _box(step[name] / longest, name, f"{title}: {1e3 * step[name]:.3g} ms")
        yield '</div><div class="lane thin">'
        ends = _extent(step)
        begins = max(0.0, ends - step["communication"])
        yield _box(begins / longest, "", "")
        title = f"exchange: {1e3 * step['communication']:.3g} ms"
        yield _box((ends - begins) / longest, "exchange", title)
        yield "</div></div>"
    named = [*_PARTS, ("exchange", "exchange, in the second lane")]
    keys = (
        f'<span><i style="background:var(--{name})"></i>{title}</span>' for name, title in named
    )
    yield f'<div class="legend">{"".join(keys)}</div>'
    yield (
        '<p class="soft">Parts are from steps after those that were timed. Their order is: input, '
        "forward, backward, optimizer; here the first and the last are one.</p>"
    )


def _extent(step: Mapping[str, float]) -> float:
    return sum(step[name] for name, _ in _PARTS)


def _box(share: float, name: str, title: str) -> str:
    colour = f"background:var(--{name})" if name else ""
    return f'<div style="width:{100 * share:.3f}%;{colour}" title="{escape(title)}"></div>'


def _ratios(comparison: Comparison, whole: Ratio) -> Iterator[str]:
    """The ratio of each launch, and of all with the interval."""
    means = [
        math.exp(Launch.of(first.blocks, second.blocks).mean)
        for first, second in comparison.launches
    ]
    low = min(0.97, *means, max(whole.low, 0.25))
    high = max(1.03, *means, min(whole.high, 4.0))
    margin = 0.05 * (high - low)
    low, high = low - margin, high + margin

    def at(ratio: float) -> float:
        return 100 * (min(max(ratio, low), high) - low) / (high - low)

    height = 12 * (len(means) + 3)
    yield "<h2>The ratio, launch by launch</h2>"
    yield '<div class="plot">'
    yield f'<svg viewBox="0 0 100 {height}" preserveAspectRatio="none" height="{height}">'
    yield _line(at(1), 0, at(1), height, "--soft", 1, ' stroke-dasharray="4 4"')
    for number, mean in enumerate(means):
        yield _dot(at(mean), 12 * (number + 1), "--second", 7)
    below = 12 * (len(means) + 1.5)
    yield _line(at(whole.low), below, at(whole.high), below, "--text", 2)
    yield _dot(at(whole.value), below, "--text", 11)
    yield f'</svg></div><div class="ends soft"><span>{low:.3f}</span><span>{high:.3f}</span></div>'
    yield (
        '<p class="soft">Each small dot is the mean of one launch; the large one that of all, with '
        f"its interval ({CONFIDENCE}). The dashed line is 1: no difference.</p>"
    )


def _strip(comparison: Comparison) -> Iterator[str]:
    """The time of a step in each block, in the order in which they were taken."""
    columns: list[list[float]] = [[], []]
    ends = []
    for launch in comparison.launches:
        for column, played in zip(columns, launch, strict=True):
            column += [1e3 * seconds for seconds in played.blocks]
        ends.append(len(columns[0]))
    times = sorted([*columns[0], *columns[1]])
    low, high = 0.95 * times[0], 1.02 * times[math.ceil(_SHOWN * len(times)) - 1]
    beyond = sum(time > high for time in times)
    count = max(map(len, columns))

    def at(time: float) -> float:
        return 192 - 184 * (min(time, high) - low) / (high - low)

    yield "<h2>The time of a step, block by block</h2>"
    colours = ("--first", "--second")
    keys = "".join(
        f'<span><i style="background:var({colour})"></i>{escape(label)}</span>'
        for colour, label in zip(colours, comparison.labels, strict=True)
    )
    yield f'<div class="legend">{keys}</div><div class="ends soft"><span>{high:.3g} ms</span></div>'
    yield '<div class="plot"><svg viewBox="0 0 100 200" preserveAspectRatio="none" height="200">'
    for end in ends[:-1]:
        x = 100 * end / count
        yield _line(x, 0, x, 200, "--line", 1)
    for column, colour in zip(columns, colours, strict=True):
        for number, time in enumerate(column):
            yield _dot(100 * (number + 0.5) / count, at(time), colour, 4)
    note = f" {beyond} slower blocks are drawn at the upper edge." if beyond else ""
    yield f'</svg></div><div class="ends soft"><span>{low:.3g} ms</span></div>'
    yield f'<p class="soft">Lines part the launches.{note}</p>'


def _dot(x: float, y: float, colour: str, size: int) -> str:
    """A dot that stays round when the picture is stretched: a line without length."""
    return (
        f'<path d="M{x:.2f} {y:.2f}h0" stroke="var({colour})" stroke-width="{size}" '
        'stroke-linecap="round" vector-effect="non-scaling-stroke"/>'
    )


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str, width: int, more: str = ""
) -> str:
    return (
        f'<path d="M{x1:.2f} {y1:.2f}L{x2:.2f} {y2:.2f}" stroke="var({colour})" '
        f'stroke-width="{width}" vector-effect="non-scaling-stroke"{more}/>'
    )
