"""Hooks of mkdocs: pages for notebooks, and for the files of the navigation that lie outside of ``docs/``.

Links are written for the repository: ``../CONTRIBUTING.md`` on a page of ``docs``, ``docs/notation.md`` in
``CONTRIBUTING.md``. In the site a page of ``docs`` has its path within ``docs``, and another file of the navigation its
path in the repository, so the links between them are changed from one into the other.
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
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs/"


def site_path(path: str) -> str:
    """The path in the site's sources of a file of the repository."""
    inner = path.removeprefix(DOCS)
    return f"{inner}.md" if path.endswith(".ipynb") else inner


def from_notebook(path: str) -> str:
    """The cells of a notebook as Markdown, without outputs."""
    cells = [
        "".join(cell["source"]) if cell["cell_type"] == "markdown" else f"```python\n{''.join(cell['source'])}\n```"
        for cell in json.loads((ROOT / path).read_text())["cells"]
    ]
    return "\n\n".join([cells[0], f"This page is the notebook `{path}` of the repository.", *cells[1:]])


class _Links(Treeprocessor):
    """Changes the links of a page from the repository's paths to those of the site."""

    page = ""

    def run(self, root: Element) -> None:
        for element in root.iter("a"):
            parts = urlsplit(element.get("href", ""))
            target = os.path.normpath(os.path.join(os.path.dirname(self.page), parts.path))
            if parts.path and not parts.netloc and (ROOT / target).is_file():
                start = os.path.dirname(site_path(self.page))
                element.set("href", parts._replace(path=os.path.relpath(site_path(target), start)).geturl())


class _LinksExtension(Extension):
    def __init__(self) -> None:
        super().__init__()
        self.links = _Links()

    def extendMarkdown(self, md: markdown.Markdown) -> None:  # noqa: N802 - the interface of markdown
        # After links are elements (priority 20), and before mkdocs checks them (0).
        md.treeprocessors.register(self.links, "site_links", 5)


_EXTENSION = _LinksExtension()
# The repository's path of each page that is made here, by its path in the site's sources.
_MADE: dict[str, str] = {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the extension that changes links, and give notebooks in the navigation the names of their pages."""
    config.markdown_extensions.append(_EXTENSION)  # type: ignore[arg-type]
    _MADE.clear()
    for name in _names(config.nav):
        path = name if (ROOT / name).is_file() else DOCS + name
        if path == name or name.endswith(".ipynb"):
            _MADE[site_path(path)] = path
    config.nav = json.loads(json.dumps(config.nav).replace('.ipynb"', '.ipynb.md"'))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here, in the place of notebooks."""
    for name, path in _MADE.items():
        if (source := files.get_file_from_path(path.removeprefix(DOCS))) is not None:
            files.remove(source)
        content = from_notebook(path) if path.endswith(".ipynb") else (ROOT / path).read_text()
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Tell the extension where the page lies."""
    name = page.file.src_uri
    _EXTENSION.links.page = _MADE.get(name, DOCS + name)
    return markdown


def _names(nav: Any) -> Iterator[str]:
    """The files in the navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for inner in nav.values() if isinstance(nav, dict) else nav:
            yield from _names(inner)
