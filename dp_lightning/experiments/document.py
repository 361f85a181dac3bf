"""A page of headings, sentences, tables and pictures, as Markdown and as one self-contained HTML file."""

import html
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from markdown import Markdown
from markdown.treeprocessors import InlineProcessor
from markdown.util import Registry

from dp_lightning.atomic_files import replacing

# Pictures take the colour of the text: see `_inline`.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<style>
:root {{ color-scheme: light dark; --text: #1a1a1a; --page: #fff; --line: #d5d5d5; --warning: #a32d00; }}
@media (prefers-color-scheme: dark) {{
:root {{ --text: #e4e4e4; --page: #17191d; --line: #45484f; --warning: #ff9b73; }}
}}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.2rem; margin-top: 2.5rem; }} h3 {{ font-size: 1rem; }}
table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }}
table {{ display: block; overflow-x: auto; }}
th, td {{ padding: .3rem .55rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }}
td {{ white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
thead th {{ border-bottom: 2px solid var(--text); }}
.prose th, .prose td {{ text-align: left; white-space: normal; min-width: 5rem; }}
a {{ color: inherit; }}
pre {{ overflow-x: auto; border: 1px solid var(--line); padding: .5rem; font-size: .85rem; }}
.warning {{ border-left: .3rem solid var(--warning); color: var(--warning); padding-left: .7rem; }}
figure {{ margin: 1rem 0; display: inline-block; max-width: 100%; vertical-align: top; }}
figure svg {{ display: block; max-width: 100%; height: auto; }}
figure svg text {{ fill: currentColor; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""
# What of Markdown a text of somebody else may use, in the order in which it is looked for: no HTML, links or pictures.
_QUOTED = ("backtick", "escape", "em_strong")
_OWN = ("backtick", "escape", "link", "em_strong")


class Link(NamedTuple):
    """A cell of a table that leads to a file."""

    text: str
    target: Path


class Document:
    """The parts of a page in order; all text is plain.

    Args:
        title: of the page.
        folder: where the page is written; links are relative to it.
        warning: comes first on the page, and shortened on every figure.
    """

    def __init__(self, title: str, folder: Path, *, warning: str | None = None) -> None:
        self.title, self.folder, self.warning = title, folder, warning
        # Markdown and HTML.
        self._parts: list[tuple[str, str]] = []
        self._pictures: dict[str, Callable[[], bytes]] = {}
        self._add(f"# {_escaped(title)}")
        if warning:
            self.warn(warning)

    def _add(self, markdown: str) -> None:
        self._parts.append((markdown, _converted(markdown, _OWN)))

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._add(f"## {_escaped(text)}")

    def say(self, text: str) -> None:
        """Add a paragraph."""
        self._add(_escaped(text))

    def warn(self, text: str) -> None:
        """Add a paragraph that stands out."""
        shown = f'<p class="warning"><strong>{html.escape(_one_line(text))}</strong></p>'
        self._parts.append((f"**{_escaped(text)}**", shown))

    def table(self, rows: Sequence[Sequence[str | Link]], *, prose: bool = False) -> None:
        """Add a table; the first row is the header.

        Args:
            prose: whether its cells hold sentences, which are wrapped, and not numbers.
        """
        head, *body = ("| " + " | ".join(map(self._cell, row)) + " |" for row in rows)
        rule = "| " + " | ".join(["---"] * len(rows[0])) + " |"
        markdown = "\n".join([head, rule, *body])
        shown = _converted(markdown, _OWN)
        self._parts.append((markdown, f'<div class="prose">{shown}</div>' if prose else shown))

    def _cell(self, content: str | Link) -> str:
        if isinstance(content, str):
            return _escaped(content)
        return f"[{_escaped(content.text)}]({quote(os.path.relpath(content.target, self.folder))})"

    def code(self, text: str) -> None:
        """Add a text whose lines are kept."""
        longest = max(map(len, re.findall("`+", text)), default=0)
        fence = "`" * max(3, longest + 1)
        self._parts.append((f"{fence}\n{text}\n{fence}", f"<pre>{html.escape(text)}</pre>"))

    def quoted(self, markdown: str) -> None:
        """Add a text in Markdown, its headings one level down; HTML, links and pictures in it are shown as text."""
        text = re.sub("^#", "##", markdown, flags=re.MULTILINE)
        self._parts.append((text, f'<div class="prose">{_converted(text, _QUOTED)}</div>'))

    def picture(self, name: str, caption: str, *, svg: str, png: Callable[[], bytes]) -> None:
        """Add a figure: linked in Markdown as ``<name>.png`` and ``<name>.svg``, part of the HTML.

        Args:
            png: draws it; called when the page is published.
        """
        self._pictures |= {f"{name}.svg": svg.encode, f"{name}.png": png}
        text, link = html.escape(caption), quote(name)
        self._parts.append(
            (
                f"![{_escaped(caption)}]({link}.png)\n\n[SVG]({link}.svg)",
                f'<figure role="img" aria-label="{text}">{_inline(svg)}<figcaption>{text}</figcaption></figure>',
            )
        )

    def markdown(self) -> str:
        """Return the page as Markdown, with links to the pictures."""
        return "\n\n".join(text for text, _ in self._parts) + "\n"

    def html(self) -> str:
        """Return the page as one HTML file, with the pictures in it."""
        return _PAGE.format(title=html.escape(self.title), body="\n".join(shown for _, shown in self._parts))

    def write_html(self, name: str) -> Path:
        """Write the HTML file into the folder, and nothing else; returns its path."""
        with replacing(self.folder / name) as file:
            file.write(self.html().encode(errors="replace"))
        return self.folder / name

    def publish(self, name: str) -> None:
        """Write ``<name>.md``, the pictures and ``<name>.html``, and print the Markdown."""
        text = self.markdown()
        for file_name, content in {f"{name}.md": lambda: text.encode(errors="replace"), **self._pictures}.items():
            with replacing(self.folder / file_name) as file:
                file.write(content())
        path = self.write_html(f"{name}.html")
        print(text)
        print(f"Written to {path}")


def _converted(markdown: str, patterns: tuple[str, ...]) -> str:
    """HTML of a Markdown text in which only these inline patterns mean something."""
    converter = Markdown(extensions=["tables"])
    # Text is plain: what `_escaped` escapes is shown as it is, and none of it is HTML.
    converter.ESCAPED_CHARS = [*converter.ESCAPED_CHARS, "<"]
    converter.preprocessors.deregister("html_block")
    converter.parser.blockprocessors.deregister("reference")
    known, converter.inlinePatterns = converter.inlinePatterns, Registry()
    for place, name in enumerate(patterns):
        converter.inlinePatterns.register(known[name], name, -place)
    converter.treeprocessors.register(InlineProcessor(converter), "inline", 20)  # in the place of one that knows all
    return converter.convert(markdown)


def _inline(svg: str) -> str:
    """A picture as part of an HTML page: what is black in it has the colour of the text, on light and dark screens."""
    return svg[svg.index("<svg") :].replace(": #000000", ": currentColor")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _escaped(text: str) -> str:
    """The text on one line, escaped so that Markdown shows it as it is."""
    return re.sub(r"([\\`*<|\[\]]|(?<!\w)_|_(?!\w))", r"\\\1", _one_line(text))
