"""The site of docs/: it builds without a warning, every page is reached, and nothing comes from another host."""

import functools
import html
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from pages import ROOT

pytestmark = pytest.mark.docs

PACKAGES = ("privacy", "callbacks", "postprocess", "datamodules", "lightning_modules", "models")
# How a page loads something; links are followed by a reader only.
LOADED = re.compile(r'<(?:script|img|iframe|source|link|object)\b[^>]*?\s(?:src|href|data)="([^"]*)"')
LINKS, IDS = re.compile(r'<a\b[^>]*?\shref="([^"]*)"'), re.compile(r'<[^>]*?\sid="([^"]*)"')


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
def found(pattern, path):
    return {html.unescape(text) for text in pattern.findall(path.read_text())}


def in_navigation():
    def names(nav):
        for entry in [nav] if isinstance(nav, str) else nav.values() if isinstance(nav, dict) else nav:
            yield from [entry] if isinstance(entry, str) else names(entry)

    return list(names(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))


def test_every_page_of_docs_is_in_the_navigation_once_and_is_built(site):
    listed = in_navigation()
    docs = ROOT / "docs"
    written = {path.relative_to(docs).as_posix() for ending in ("md", "ipynb") for path in docs.rglob(f"*.{ending}")}
    assert written <= set(listed)
    assert len(set(listed)) == len(listed)
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {name.removesuffix(".md").replace("README", "index") + ".html" for name in listed} <= built


def test_a_link_within_the_site_leads_to_a_page_and_a_heading(site):
    followed = 0
    for page in site.rglob("*.html"):
        for link in found(LINKS, page):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or page.name == "404.html":
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{link} on {page.name}"
            assert not parts.fragment or unquote(parts.fragment) in found(IDS, target), f"{link} on {page.name}"
            followed += target != page
    assert followed > 500


def test_no_page_loads_anything_from_another_host(site):
    for page in site.rglob("*.html"):
        assert not [load for load in found(LOADED, page) if urlsplit(load).netloc], page.name
        assert "mermaid" not in page.read_text()  # for which the theme would load a library
    for style in site.rglob("*.css"):
        loaded = re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')\s]+)", style.read_text())
        assert not [target for target in loaded if urlsplit(target).netloc], style.name


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(site, package):
    module = importlib.import_module(f"dp_lightning.{package}")
    ids = found(IDS, site / "reference" / f"{package}.html")
    for name in module.__all__:
        # A function that is named like its file is shown under its own path.
        own = getattr(getattr(module, name), "__module__", "")
        assert {f"{module.__name__}.{name}", f"{own}.{name}"} & ids, name
