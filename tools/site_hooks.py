"""Hooks of mkdocs: pages for what lies outside of ``docs/``, and for notebooks.

Links are written for the repository: ``../CONTRIBUTING.md`` on a page of ``docs``, ``docs/notation.md`` in
``CONTRIBUTING.md``. In the site a page of ``docs`` has its path within ``docs``, and any other file that is in the
navigation or that a page links to its path in the repository, so links are changed from one into the other. A file that
is not Markdown becomes a page with its text.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree.ElementTree import Element

import markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs"
_PAGES = (".md", ".ipynb")


def site_path(path: str) -> str:
    """The path in the site's sources of a file of the repository."""
    inner = path.removeprefix(f"{DOCS}/")
    return inner if path.endswith(".md") else f"{inner}.md"


def target_of(link: str, page: str) -> str | None:
    """The file of the repository to which a link leads; None for an anchor, another host or a missing file.

    Args:
        link: as it is written.
        page: path in the repository of the page with the link.
    """
    parts = urlsplit(link)
    path = os.path.normpath(os.path.join(os.path.dirname(page), parts.path))
    return path if parts.path and not parts.scheme and not parts.netloc and (ROOT / path).is_file() else None


def text_of(path: str) -> str:
    """The page of a file of the repository, as Markdown."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    if path.endswith(".ipynb"):
        return from_notebook(json.loads(text), os.path.basename(path))
    language = {".py": "python", ".yaml": "yaml", ".sh": "bash"}.get(os.path.splitext(path)[1], "text")
    return f"# {path}\n\n{fenced(language, text)}"


def from_notebook(notebook: dict[str, Any], name: str) -> str:
    """The cells of a notebook as Markdown, without outputs."""
    cells = [
        "".join(cell["source"]) if cell["cell_type"] == "markdown" else fenced("python", "".join(cell["source"]))
        for cell in notebook["cells"]
    ]
    title, *others = cells
    return "\n\n".join([title, f"This page is the notebook `{DOCS}/notebooks/{name}` of the repository.", *others])


def fenced(language: str, code: str) -> str:
    """A block of code. Its fence is longer than any inside."""
    fence = "```"
    while fence in code:
        fence += "`"
    return f"{fence}{language}\n{code.rstrip()}\n{fence}"


class _Links(Treeprocessor):
    """Changes the links of a page from the repository's paths to those of the site."""

    page = ""

    def run(self, root: Element) -> None:
        for element in root.iter("a"):
            link = element.get("href", "")
            if (target := target_of(link, self.page)) is not None:
                start = os.path.dirname(site_path(self.page))
                element.set("href", urlsplit(link)._replace(path=os.path.relpath(site_path(target), start)).geturl())


class _LinksExtension(Extension):
    def __init__(self) -> None:
        super().__init__()
        self.links = _Links()

    def extendMarkdown(self, md: markdown.Markdown) -> None:  # noqa: N802 - the interface of markdown
        # After links are elements (priority 20), and before mkdocs checks them (0).
        md.treeprocessors.register(self.links, "site_links", 5)


_EXTENSION = _LinksExtension()
# The repository's path of each page that lies outside of docs/ or is no Markdown, by its path in the site's sources.
_ADDED: dict[str, str] = {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the extension that changes links, and give notebooks in the navigation the names of their pages."""
    config.markdown_extensions.append(_EXTENSION)  # type: ignore[arg-type]
    config.nav = _named(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of notebooks, and of files in the navigation or behind links that lie outside of ``docs/``."""
    _ADDED.clear()
    listed = set(_names(config.nav))
    waiting = [f"{DOCS}/{file.src_uri}" for file in files if file.src_uri.endswith(_PAGES)]
    waiting += [name for name in listed if (ROOT / name).is_file()]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if path.endswith(_PAGES):
            waiting += [target for link in _links(text_of(path)) if (target := target_of(link, path))]
        if not (path.startswith(f"{DOCS}/") and path.endswith(".md")):
            _ADDED[site_path(path)] = path
    for source in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(source)
    for name, path in _ADDED.items():
        level = InclusionLevel.INCLUDED if name in listed else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, name, content=text_of(path), inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Tell the extension where the page lies."""
    name = page.file.src_uri
    _EXTENSION.links.page = _ADDED.get(name, f"{DOCS}/{name}")
    return markdown


def _links(text: str) -> list[str]:
    found: list[str] = []

    class Collect(Treeprocessor):
        def run(self, root: Element) -> None:
            found.extend(element.get("href", "") for element in root.iter("a"))

    reader = markdown.Markdown(extensions=["tables", "fenced_code"])
    reader.treeprocessors.register(Collect(), "collect", 5)
    reader.convert(text)
    return found


def _named(nav: Any) -> Any:
    """The navigation with the pages of notebooks in place of the notebooks."""
    if isinstance(nav, str):
        return site_path(nav) if nav.endswith(".ipynb") else nav
    if isinstance(nav, dict):
        return {title: _named(inner) for title, inner in nav.items()}
    return [_named(inner) for inner in nav]


def _names(nav: Any) -> Iterator[str]:
    """The files in the navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for inner in nav.values() if isinstance(nav, dict) else nav:
            yield from _names(inner)
