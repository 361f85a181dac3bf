"""A page of headings, sentences, tables and pictures, as Markdown and as one self-contained HTML file."""

import base64
import html
import re
from pathlib import Path
from urllib.parse import quote

from markdown import Markdown

from dp_lightning.atomic_files import replacing

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.2rem; margin-top: 2.5rem; }}
table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }}
table {{ display: block; overflow-x: auto; }}
th, td {{ padding: .3rem .55rem; border-bottom: 1px solid #d5d5d5; text-align: right; }}
td {{ white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
thead th {{ border-bottom: 2px solid #1a1a1a; }}
img {{ max-width: 100%; height: auto; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


class Document:
    """The parts of a page in order; all text is plain.

    Args:
        title: of the page.
        folder: where the page and its figures are written.
        warning: comes first on the page, and shortened on every figure.
    """

    def __init__(self, title: str, folder: Path, *, warning: str | None = None) -> None:
        self.title, self.folder, self.warning = title, folder, warning
        # Markdown, and HTML if it is not converted from the Markdown.
        self._parts: list[tuple[str, str | None]] = [(f"# {_escaped(title)}", None)]
        if warning:
            self._parts.append((f"**{_escaped(warning)}**", None))

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._parts.append((f"## {_escaped(text)}", None))

    def say(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append((_escaped(text), None))

    def table(self, rows: list[list[str]]) -> None:
        """Add a table; the first row is the header."""
        head, *body = ("| " + " | ".join(map(_escaped, row)) + " |" for row in rows)
        rule = "| " + " | ".join(["---"] * len(rows[0])) + " |"
        self._parts.append(("\n".join([head, rule, *body]), None))

    def picture(self, name: str, caption: str) -> None:
        """Add the figure ``<name>.png`` and ``<name>.svg`` of the folder: linked in Markdown, embedded in HTML."""
        data = base64.b64encode((self.folder / f"{name}.svg").read_bytes()).decode()
        text, link = html.escape(caption), quote(name)
        self._parts.append(
            (
                f"![{_escaped(caption)}]({link}.png)\n\n[SVG]({link}.svg)",
                f'<figure><img alt="{text}" src="data:image/svg+xml;base64,{data}">'
                f"<figcaption>{text}</figcaption></figure>",
            )
        )

    def markdown(self) -> str:
        """Return the page as Markdown, with links to the pictures."""
        return "\n\n".join(text for text, _ in self._parts) + "\n"

    def html(self) -> str:
        """Return the page as one HTML file, with the pictures embedded."""
        converter = Markdown(extensions=["tables"])
        # Text is plain: what `_escaped` escapes is shown as it is, and none of it is HTML.
        converter.ESCAPED_CHARS = [*converter.ESCAPED_CHARS, "<"]
        converter.preprocessors.deregister("html_block")
        for pattern in ("html", "entity"):
            converter.inlinePatterns.deregister(pattern)
        body = "\n".join(converter.convert(text) if shown is None else shown for text, shown in self._parts)
        return _PAGE.format(title=html.escape(self.title), body=body)

    def write(self, name: str) -> None:
        """Write ``<name>.md`` and ``<name>.html``."""
        for path, text in ((f"{name}.md", self.markdown()), (f"{name}.html", self.html())):
            with replacing(self.folder / path) as file:
                file.write(text.encode())

    def publish(self, name: str) -> None:
        """Write ``<name>.md`` and ``<name>.html``, and print the Markdown."""
        self.write(name)
        print(self.markdown())
        print(f"Written to {self.folder / f'{name}.html'}")


def _escaped(text: str) -> str:
    """The text on one line, escaped so that Markdown shows it as it is."""
    return re.sub(r"([\\`*<|\[\]]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(text.split()))
