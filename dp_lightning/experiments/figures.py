"""Figures as SVG, drawn with matplotlib."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments.document import Document

# Okabe and Ito 2008: colour-blind people can tell them apart too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
_MARKERS = "osD^vPX*"
# Text stays text and has no formulas, and the same figure gives the same file.
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "text.parse_math": False, "font.size": 10}


def style(number: int) -> dict[str, Any]:
    """Colour and marker of a line."""
    return {"color": _COLOURS[number % len(_COLOURS)], "marker": _MARKERS[number % len(_MARKERS)]}


@contextmanager
def figure(
    page: Document, name: str, caption: str, *, panels: int = 1, height: float = 3.6, warning: str | None = None
) -> Iterator[Sequence[Any]]:
    """Axes to draw on; at the end the figure is added to the page, with a legend where lines have labels.

    Args:
        panels: Number of axes, two per row.
        height: Height of each row of axes in inches.
        warning: Text above the axes; None takes the page's own.

    Raises:
        ConfigurationError: if matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("Figures need matplotlib: pip install 'dp-lightning[report]'") from error
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        columns = min(panels, 2)
        rows = -(-panels // columns)
        drawn = Figure(figsize=(5.0 * columns + 0.5, height * rows + 0.2), layout="constrained")
        every = drawn.subplots(rows, columns, squeeze=False).flatten()
        axes = list(every[:panels])
        for ax in every[panels:]:
            ax.set_visible(False)
        yield axes
        for ax in axes:
            ax.grid(alpha=0.3)
            if ax.get_legend_handles_labels()[0]:
                ax.legend(frameon=False, fontsize=8)
        if shown := warning or page.warning:
            drawn.suptitle(shown.split(". ")[0], color=_COLOURS[1], fontsize=8)
        svg = io.StringIO()
        drawn.savefig(svg, format="svg", metadata={"Date": None})
    page.picture(name, caption, svg.getvalue())


def place_on_axis(ax: Any, labels: Sequence[str]) -> range:
    """Positions on the x axis for the points of a grid's axis, evenly spaced and marked with their labels."""
    ax.set_xticks(range(len(labels)), labels)
    return range(len(labels))
