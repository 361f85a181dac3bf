"""Figures as PNG and SVG, drawn with matplotlib."""

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments.document import Document

# Okabe and Ito 2008: colour-blind people can tell them apart too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
_MARKERS = "osD^vPX*"


def style(number: int) -> dict[str, Any]:
    """Colour and marker of a line."""
    return {"color": _COLOURS[number % len(_COLOURS)], "marker": _MARKERS[number % len(_MARKERS)]}


@contextmanager
def figure(
    page: Document, name: str, caption: str, *, panels: int = 1, height: float = 3.6, warning: str | None = None
) -> Iterator[Sequence[Any]]:
    """Axes to draw on; at the end the figure is added to the page.

    Args:
        panels: number of axes, two per row.
        height: of each, in inches.
        warning: above the axes; None is the page's own.

    Raises:
        ConfigurationError: if matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("Figures need matplotlib: pip install 'dp-lightning[report]'") from error
    # Text stays text, the same figure gives the same file, and the page is seen through it.
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10, "axes.facecolor": "none"}
    ):
        columns = min(panels, 2)
        rows = -(-panels // columns)
        drawn = Figure(figsize=(5.0 * columns + 0.5, height * rows + 0.2), layout="constrained")
        every = drawn.subplots(rows, columns, squeeze=False).flatten()
        axes = list(every[:panels])
        for ax in every[panels:]:
            ax.set_visible(False)
        for ax in axes:
            ax.grid(alpha=0.3)
            ax.spines[["top", "right"]].set_visible(False)
        if shown := warning or page.warning:
            drawn.suptitle(shown.split(". ")[0], color=_COLOURS[1], fontsize=8)
        yield axes
        svg, unnamed = io.StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
        drawn.savefig(svg, format="svg", facecolor="none", metadata=unnamed)

    def png() -> bytes:
        file = io.BytesIO()
        drawn.savefig(file, format="png", dpi=150, facecolor="white", metadata={"Software": None})
        return file.getvalue()

    page.picture(name, caption, svg=svg.getvalue(), png=png)


def plain(label: str) -> str:
    """Text that matplotlib shows as it is: it takes dollars for formulas, and omits labels like _a from the legend."""
    text = label.encode(errors="replace").decode().replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def place_on_axis(ax: Any, labels: Sequence[str]) -> list[float]:
    """Positions on the x axis for the points of a grid's axis: their values, or 0, 1, ... if one is not a number.

    Positive values that span a factor of eight or more get a logarithmic scale to base two.
    """
    values = [_number(label) for label in labels]
    if not all(map(math.isfinite, values)):
        ax.set_xticks(range(len(labels)), [plain(label) for label in labels])
        return [float(k) for k in range(len(labels))]
    if min(values) > 0 and max(values) / min(values) >= 8:
        ax.set_xscale("log", base=2)
    ax.set_xticks(values, labels)
    ax.minorticks_off()
    return values


def _number(label: str) -> float:
    try:
        return float(label)
    except ValueError:
        return math.nan
