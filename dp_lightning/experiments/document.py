"""A page of headings, sentences, tables and figures: Markdown, and one HTML file that needs no other."""

import base64
import html
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from dp_lightning.atomic_files import replacing
from dp_lightning.errors import ConfigurationError

# Okabe and Ito 2008: colour-blind people can tell them apart too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
_MARKERS = "osD^vPX*"
# Text stays text and has no formulas, and the same figure gives the same file.
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "text.parse_math": False, "font.size": 10}


class Document:
    """The parts of a page in order; all text is plain.

    Args:
        title: Title of the page.
        folder: Folder where the page is written.
        warning: Paragraph that comes first on the page; its first sentence stands on every figure.
    """

    def __init__(self, title: str, folder: Path, *, warning: str | None = None) -> None:
        self.title, self.folder, self.warning = title, folder, warning
        self._parts = [f"# {_escaped(title)}", *([f"**{_escaped(warning)}**"] if warning else [])]
        self._pictures: dict[str, str] = {}

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._parts.append(f"## {_escaped(text)}")

    def say(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(_escaped(text))

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Add a table; the first row is the header."""
        head, *body = ("| " + " | ".join(map(_escaped, row)) + " |" for row in rows)
        self._parts.append("\n".join([head, "| " + " | ".join(["---"] * len(rows[0])) + " |", *body]))

    def fold(self, summary: str, text: str) -> None:
        """Add a text whose lines are kept, below a summary that opens it."""
        shown = html.escape(text, quote=False)
        self._parts.append(f"<details><summary>{_escaped(summary)}</summary>\n\n<pre>{shown}</pre>\n\n</details>")

    def quoted(self, markdown: str) -> None:
        """Add a text in Markdown, its headings one level down."""
        self._parts.append(re.sub("^#", "##", html.escape(markdown, quote=False), flags=re.MULTILINE).strip())

    def picture(self, name: str, caption: str, svg: str) -> None:
        """Add a picture: linked in Markdown as ``<name>.svg``, part of the HTML."""
        self._pictures[f"{name}.svg"] = svg
        self._parts.append(f"![{_escaped(caption)}]({quote(name)}.svg)")

    def markdown(self) -> str:
        """The page as Markdown, with links to the pictures."""
        return "\n\n".join(self._parts) + "\n"

    def html(self) -> str:
        """The page as one HTML file, with the pictures in it.

        Raises:
            ConfigurationError: if the package markdown is not installed.
        """
        try:
            from markdown import markdown
        except ImportError as error:
            raise ConfigurationError("A page needs markdown: pip install 'dp-lightning[report]'") from error
        body = markdown(self.markdown(), extensions=["tables"])
        for name, svg in self._pictures.items():
            data = f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
            body = re.sub(
                rf'<p><img alt="([^"]*)" src="{re.escape(quote(name))}" /></p>',
                rf'<figure><img alt="\1" src="{data}"><figcaption>\1</figcaption></figure>',
                body,
            )
        page = Template(files("dp_lightning.experiments").joinpath("page.html").read_text())
        return page.substitute(title=html.escape(self.title), body=body)

    def write_html(self, name: str) -> Path:
        """Write the HTML file into the folder, and nothing else; returns its path."""
        with replacing(self.folder / name) as file:
            file.write(self.html().encode())
        return self.folder / name

    def publish(self, name: str) -> None:
        """Write ``<name>.html``, ``<name>.md`` and the pictures, and print the Markdown."""
        path = self.write_html(f"{name}.html")
        for file_name, content in {f"{name}.md": self.markdown(), **self._pictures}.items():
            with replacing(self.folder / file_name) as file:
                file.write(content.encode())
        print(self.markdown())
        print(f"Written to {path}")


def style(number: int) -> dict[str, Any]:
    """Colour and marker of a line."""
    return {"color": _COLOURS[number % len(_COLOURS)], "marker": _MARKERS[number % len(_MARKERS)]}


@contextmanager
def figure(page: Document, name: str, caption: str, *, panels: int = 1) -> Iterator[Sequence[Any]]:
    """Axes to draw on; at the end the figure is added to the page, with a legend where lines have labels.

    Args:
        panels: Number of axes, two per row.

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
        drawn = Figure(figsize=(5.0 * columns + 0.5, 3.6 * rows + 0.2), layout="constrained")
        every = drawn.subplots(rows, columns, squeeze=False).flatten()
        axes = list(every[:panels])
        for ax in every[panels:]:
            ax.set_visible(False)
        yield axes
        for ax in axes:
            ax.grid(alpha=0.3)
            if ax.get_legend_handles_labels()[0]:
                ax.legend(frameon=False, fontsize=8)
        if page.warning:
            drawn.suptitle(page.warning.split(". ")[0], color=_COLOURS[1], fontsize=8)
        svg = io.StringIO()
        drawn.savefig(svg, format="svg", metadata={"Date": None})
    page.picture(name, caption, svg.getvalue())


def _escaped(text: str) -> str:
    """The text on one line, escaped so that Markdown shows it as it is."""
    shown = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*|\[\]]|(?<!\w)_|_(?!\w))", r"\\\1", shown)
