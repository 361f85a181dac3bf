"""Opens a page in Chromium, as a reader would; tests that need it are skipped where it is missing."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

_QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


class Seen(NamedTuple):
    """What a browser shows of a page."""

    title: str
    console: list[str]
    """Messages and errors."""
    figures: list[float]
    """Width of each picture in pixels."""
    rows: int
    """Of all tables."""
    overflow: int
    """Pixels that the page is wider than the window."""
    colours: tuple[str, str]
    """Of the text in a picture, and of the page behind it."""


def look_at(page: Path, windows: Iterable[tuple[int, str]] = ((1280, "light"),)) -> list[Seen]:
    """Open a page in windows of a width in pixels, each on a screen that is ``light`` or ``dark``."""
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
    if browser is None:
        pytest.skip("no Chromium here to open the page in: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=[*_QUIET, "--disable-sync"])
        seen = [_opened(chromium, page, width, scheme) for width, scheme in windows]
        chromium.close()
    return seen


def _opened(chromium, page, width, scheme):
    opened = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.goto(page.as_uri())
    figures = "[...document.querySelectorAll('figure svg')].map(svg => svg.getBoundingClientRect().width)"
    wider = "document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth"
    colours = """[getComputedStyle(document.querySelector('figure svg text')).fill,
                  getComputedStyle(document.body).backgroundColor]"""
    return Seen(
        title=opened.title(),
        console=said,
        figures=opened.evaluate(figures),
        rows=opened.locator("table tr").count(),
        overflow=opened.evaluate(wider),
        colours=tuple(opened.evaluate(colours)),
    )
