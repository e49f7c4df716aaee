"""matplotlib, which nothing else of tritonddp needs, as all pictures draw with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

try:
    import matplotlib

    matplotlib.use("agg")  # draws into files, needs no display
    from matplotlib import pyplot
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError(
        "pictures are drawn with matplotlib, which is not installed: pip install matplotlib"
    ) from error

from benchmarks.base.results import Result

# Okabe and Ito's palette, which colour-blind eyes tell apart.
OURS, STOCK, OTHER = "#0072b2", "#e69f00", "#8c8c8c"
LIMIT = "#d55e00"

__all__ = ["Axes", "Figure", "pyplot"]


def save(figure: Figure, path: Path, dpi: int | None = 120) -> None:
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)


def finish(figure: Figure, title: str, result: Result, note: str) -> None:
    """Title, and below everything in small print what was measured where."""
    figure.suptitle(title, fontsize=13)
    figure.supxlabel(f"{note}\n{result.source}", fontsize=8, color="#444444")


def save_themed(
    path: Path, colours: Mapping[str, Mapping[str, str]], draw: Callable[..., Figure]
) -> None:
    """Draw an SVG file for light and dark pages: ``path`` with the theme before its suffix.

    Args:
        colours: by theme; that of texts is ``"ink"``.
        draw: makes the figure of a theme's colours.
    """
    for theme, chosen in colours.items():
        style = {
            "svg.fonttype": "none",
            "svg.hashsalt": "tritonddp",
            "text.color": chosen["ink"],
            "font.family": "sans-serif",
        }
        target = path.with_name(f"{path.stem}-{theme}{path.suffix}")
        with pyplot.rc_context(style):
            figure = draw(chosen)
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(target, transparent=True, metadata=metadata)
            pyplot.close(figure)
        print(f"written: {target}")
