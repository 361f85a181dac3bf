"""Markdown pages as the tests read them: code blocks, tables by their cells, code spans and links.

CommonMark with tables, parsed by markdown-it-py: what a forge would show as a table or as code is one here too.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    """Its text as a reader sees it: without the signs for code, links and emphasis."""
    code: tuple[str, ...]
    """The code spans in that text."""


@dataclass(frozen=True)
class Table:
    """A table of a page."""

    head: tuple[str, ...]
    """The texts of its first row."""
    rows: tuple[tuple[Cell, ...], ...]
    """The other rows."""


@cache
def read(name: str) -> str:
    """The text of a page, named by its path in the repository."""
    return (ROOT / name).read_text()


@cache
def _tokens(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(text)


def blocks(language: str, text: str) -> list[str]:
    """The fenced code blocks in a language."""
    return [token.content for token in _tokens(text) if token.type == "fence" and token.info == language]


def lines(language: str, text: str) -> list[str]:
    """The lines of all fenced code blocks in a language."""
    return [line for block in blocks(language, text) for line in block.splitlines()]


def _inline(text: str) -> list[Token]:
    return [child for token in _tokens(text) for child in token.children or []]


def spans(text: str) -> list[str]:
    """The code spans, those in tables included."""
    return [token.content for token in _inline(text) if token.type == "code_inline"]


def links(text: str) -> list[str]:
    """The targets of links."""
    return [str(token.attrs["href"]) for token in _inline(text) if token.type == "link_open"]


def tables(text: str) -> list[Table]:
    """The tables, from the first to the last one."""
    found: list[list[list[Cell]]] = []
    for before, token in pairwise(_tokens(text)):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif before.type in ("th_open", "td_open"):
            children = token.children or []
            code = tuple(child.content for child in children if child.type == "code_inline")
            found[-1][-1].append(Cell("".join(child.content for child in children), code))
    return [Table(tuple(cell.text for cell in head), tuple(map(tuple, rows))) for head, *rows in found]


def table(text: str, *head: str) -> Table:
    """The only table whose head begins with these cells."""
    (found,) = [each for each in tables(text) if each.head[: len(head)] == head]
    return found
