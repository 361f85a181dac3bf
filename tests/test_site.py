"""The site of docs/: it builds without a warning, every page is reached, and nothing comes from another host."""

import functools
import http.server
import importlib
import os
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from pages import ROOT

pytestmark = pytest.mark.docs

PACKAGES = ("privacy", "callbacks", "postprocess", "datamodules", "lightning_modules", "models")
# How a page loads something; other links are followed by a reader only.
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}


class Html(HTMLParser):
    """What the tests look at on a page."""

    def __init__(self, path):
        super().__init__()
        self.loads, self.links, self.ids, self.classes = [], [], set(), set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids |= {found["id"]} if "id" in found else set()
        self.classes |= set((found.get("class") or "").split())
        if tag in LOADING and LOADING[tag] in found:
            self.loads.append(found[LOADING[tag]])
        elif tag == "a" and "href" in found:
            self.links.append(found["href"])


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    beside = Path(sys.executable).with_name("mkdocs")
    mkdocs = str(beside) if beside.exists() else shutil.which("mkdocs")
    if mkdocs is None:
        pytest.skip("no mkdocs here to build the site: pip install 'dp-lightning[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [mkdocs, "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml"), "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@functools.cache
def html(path):
    return Html(path)


def pages(site):
    return sorted(site.rglob("*.html"))


def in_navigation():
    def names(nav):
        for entry in [nav] if isinstance(nav, str) else nav.values() if isinstance(nav, dict) else nav:
            yield from [entry] if isinstance(entry, str) else names(entry)

    return list(names(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))


def test_every_page_of_docs_is_in_the_navigation_and_every_page_there_is_a_file():
    listed = in_navigation()
    assert len(set(listed)) == len(listed)
    docs = ROOT / "docs"
    written = {path.relative_to(docs).as_posix() for ending in ("md", "ipynb") for path in docs.rglob(f"*.{ending}")}
    assert written <= set(listed)
    assert all((ROOT / name).is_file() for name in set(listed) - written)


def test_a_page_of_the_navigation_is_built(site):
    built = {path.relative_to(site).as_posix() for path in pages(site)}
    for name in in_navigation():
        page = name.removesuffix(".md").replace("README", "index")
        assert f"{page}.html" in built
    # What lies outside of docs/ and is linked from there.
    assert "Add a transform of the privatized gradient" in (site / "CONTRIBUTING.html").read_text()


def test_a_link_within_the_site_leads_to_a_page_and_a_heading(site):
    followed = 0
    for page in pages(site):
        for link in html(page).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or page.name == "404.html":
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{link} on {page.name}"
            assert not parts.fragment or unquote(parts.fragment) in html(target).ids, f"{link} on {page.name}"
            followed += target != page
    assert followed > 500


def test_no_page_loads_anything_from_another_host(site):
    for page in pages(site):
        assert not [load for load in html(page).loads if urlsplit(load).netloc], page.name
        assert "mermaid" not in html(page).classes  # for which the theme would load a library
    for style in site.rglob("*.css"):
        loaded = re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')\s]+)", style.read_text())
        assert not [target for target in loaded if urlsplit(target).netloc], style.name


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(site, package):
    module = importlib.import_module(f"dp_lightning.{package}")
    ids = html(site / "reference" / f"{package}.html").ids
    for name in module.__all__:
        # A function that is named like its file is shown under its own path.
        own = getattr(getattr(module, name), "__module__", "")
        assert {f"{module.__name__}.{name}", f"{own}.{name}"} & ids, name


def test_a_browser_asks_no_other_host_and_finds_what_is_searched_for(site):
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
    if browser is None:
        pytest.skip("no Chromium here to open the page in: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}"
        quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
        chromium = playwright.chromium.launch(executable_path=browser, args=[*quiet, "--disable-sync"])
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        asked, problems = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"{home}/index.html", wait_until="networkidle")  # the index of the search is loaded
        page.click("input[name=query]")
        page.keyboard.type("images_per_group")
        page.wait_for_selector(".md-search-result__link[href*='persons']", timeout=60_000)
        chromium.close()
        server.shutdown()
    assert not problems
    assert asked
    assert not [url for url in asked if not url.startswith(home)]
    assert os.path.getsize(site / "search" / "search_index.json") > 100_000
