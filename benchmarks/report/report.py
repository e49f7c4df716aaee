"""Tables and plots of all result files, and the figures of the pages, which nobody types.

    python benchmarks/report/report.py [--figures [--from local] | --check | --folder FOLDER]

Reads all of ``benchmarks/results/<machine>/*.json``. For each machine it writes ``tables.md`` and
plots in the same folder; with ``--figures`` also the text in ``README.md`` and ``docs/*.md``
between the markers ``<!-- figures: NAME -->`` and ``<!-- end figures -->``. ``--check`` writes
nothing, and ends with status 1 if a table or figure does not match the result files.

The folder ``local``, which `make bench` writes and git ignores, is not such a machine unless
``--folder`` names it. ``--from local`` first copies its content to ``cpu``.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, not an installed version

from benchmarks.base.results import Results, load
from benchmarks.report import tables as report_tables

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "report.md",
    ROOT / "docs" / "fewer-bytes.md",
    *sorted((ROOT / "docs").glob("benchmarks*.md")),
)
PICTURES = ROOT / "docs"  # folder of the plots that pages show
RESULTS = ROOT / "benchmarks" / "results"
TABLES = "tables.md"
LOCAL = "local"  # results of make bench on this machine; git ignores them
_FIGURES = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end figures -->)", re.DOTALL)


def main() -> int:
    options = _options()
    if options.source is not None:
        take(options.results / options.source, options.results / report_tables.CPU)
    machine = None
    if options.folder is not None:
        options.results, machine = options.folder.parent, options.folder.name
    results = load(options.results, machine, but=LOCAL)
    texts = dict(_texts(results, options.results))
    if options.figures or options.check:
        pages = {path: path.read_text() for path in options.pages}
        texts |= filled(pages, report_tables.figures(results))
    if options.check:
        stale = [path for path, text in texts.items() if _read(path) != text]
        for path in stale:
            print(f"{path} is not what the result files say: run make figures")
        return 1 if stale else 0
    for path, text in texts.items():
        same = _read(path) == text
        if not same:
            path.write_text(text)
        print(f"{'as it was' if same else 'written'}: {path}")
    for machine, content in results.items():
        is_shown = options.figures and machine == report_tables.CPU
        draw(content, options.results / machine, PICTURES if is_shown else None)
    return 0


def take(source: Path, target: Path) -> None:
    """Copy the results of one folder over those of another, without tables, which are rebuilt.

    Raises:
        ValueError: the source has no results.
    """
    if not list(source.glob("*.json")):
        raise ValueError(f"there are no results in {source}: run make bench")
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.name != TABLES:
            shutil.copyfile(path, target / path.name)
            print(f"copied from {source.name}: {target / path.name}")


def filled(pages: Mapping[Path, str], figures: Mapping[str, Sequence[str]]) -> dict[Path, str]:
    """Return the texts of the pages with the figures between their markers, each on one page.

    Raises:
        ValueError: a marker names no figure, or a figure does not have exactly one marker.
    """
    found = [match[2] for text in pages.values() for match in _FIGURES.finditer(text)]
    if sorted(found) != sorted(figures):
        names = ", ".join(path.name for path in pages)
        raise ValueError(f"{names}: markers for {found}, and there are {sorted(figures)}")

    def figure(match: re.Match[str]) -> str:
        return "\n".join([match[1], *figures[match[2]], "", match[3]])

    return {path: _FIGURES.sub(figure, text) for path, text in pages.items()}


def draw(results: Results, folder: Path, pictures: Path | None) -> None:
    """Write the plots of one machine, and the plots of the pages to the folder ``pictures``."""
    from benchmarks.report import plots as report_plots  # tables do not need matplotlib

    if "step" in results:
        report_plots.save(report_plots.ratios(results["step"]), folder / "step.png")
        if pictures is not None:
            report_plots.draw_step(results["step"], pictures / "step.svg")


def _texts(results: Mapping[str, Any], folder: Path) -> Iterator[tuple[Path, str]]:
    for machine, content in results.items():
        lines = report_tables.machine_tables(machine, content)
        yield folder / machine / TABLES, "\n".join(lines) + "\n"


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--figures", action="store_true", help="also write the figures of the pages")
    what.add_argument("--check", action="store_true", help="write nothing, compare")
    what.add_argument("--folder", type=Path, help="only this machine's")
    parser.add_argument(
        "--from",
        dest="source",
        metavar="NAME",
        help=f"with --figures: first copy this folder's results over {report_tables.CPU}",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument(
        "--pages", type=Path, nargs="+", default=PAGES, help="default: README and pages of docs"
    )
    options = parser.parse_args()
    if options.source is not None and not options.figures:
        parser.error("--from goes with --figures")
    return options


if __name__ == "__main__":
    sys.exit(main())
