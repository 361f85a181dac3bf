"""A page of headings, sentences, tables and pictures, as Markdown and as one HTML file that needs no other."""

import base64
import html
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .55rem; border-bottom: 1px solid #d5d5d5; text-align: right; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid #1a1a1a; }
img { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
"""


@dataclass(frozen=True)
class Heading:
    """Begins a section."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of text; the first one is the head."""

    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Picture:
    """A figure in two formats, in the folder of the page."""

    png: Path
    svg: Path
    caption: str


@dataclass
class Document:
    """The parts of a page in their order."""

    title: str
    warning: str | None = None
    """Stands first on the page, and in short on every figure."""
    parts: list[str | Heading | Table | Picture] = field(default_factory=list)
    """Sentences are plain text."""

    def heading(self, text: str) -> None:
        """Begin a section."""
        self.parts.append(Heading(text))

    def say(self, text: str) -> None:
        """Add a paragraph."""
        self.parts.append(text)

    def table(self, rows: list[list[str]]) -> None:
        """Add a table; the first row is the head."""
        self.parts.append(Table(tuple(tuple(row) for row in rows)))

    def picture(self, picture: Picture) -> None:
        """Add a figure."""
        self.parts.append(picture)

    def markdown(self) -> str:
        """As Markdown; pictures are linked by their names."""
        lines = [f"# {_markdown(self.title)}", ""]
        lines += [f"**{_markdown(self.warning)}**", ""] if self.warning else []
        for part in self.parts:
            if isinstance(part, Heading):
                lines += [f"## {_markdown(part.text)}", ""]
            elif isinstance(part, Table):
                head, *rows = part.rows
                lines += [_markdown_row(head), _markdown_row(["---"] * len(head))]
                lines += [*(_markdown_row(row) for row in rows), ""]
            elif isinstance(part, Picture):
                lines += [f"![{_markdown(part.caption)}]({quote(part.png.name)})", ""]
                lines += [f"[SVG]({quote(part.svg.name)})", ""]
            else:
                lines += [_markdown(part), ""]
        return "\n".join(lines)

    def html(self) -> str:
        """As one HTML file; pictures are inside."""
        body = [f"<p><strong>{html.escape(self.warning)}</strong></p>"] if self.warning else []
        for part in self.parts:
            if isinstance(part, Heading):
                body.append(f"<h2>{html.escape(part.text)}</h2>")
            elif isinstance(part, Table):
                body.append(_html_table(part))
            elif isinstance(part, Picture):
                data = base64.b64encode(part.svg.read_bytes()).decode()
                caption = html.escape(part.caption)
                body.append(
                    f'<figure><img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
                    f"<figcaption>{caption}</figcaption></figure>"
                )
            else:
                body.append(f"<p>{html.escape(part)}</p>")
        title = html.escape(self.title)
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
            '<meta name="viewport" content="width=device-width">\n<link rel="icon" href="data:,">\n'
            f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n" + "\n".join(body) + "\n</body>\n</html>\n"
        )


def _markdown_row(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(map(_markdown, cells)) + " |"


def _markdown(text: str) -> str:
    """The text as Markdown shows it as it is, on one line."""
    return re.sub(r"([\\`*<|\[\]]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(text.split()))


def _html_table(table: Table) -> str:
    head, *rows = table.rows
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table>\n<thead><tr>{cells}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'
