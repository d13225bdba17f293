"""The site builds strictly, works from a file system, loads nothing from elsewhere, and its links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.browser import CELLS, OVERFLOW, PHONE, Browser, in_browser

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href"}


class Page(HTMLParser):
    """What a page loads, what it links to, its anchors, and the options in its prose that are not marked."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.classes: set[str] = set()
        self.unmarked: list[str] = []
        self._open: list[tuple[str, str | None]] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        self.classes |= set(values.get("class", "").split())
        if tag in LOADED and values.get("rel") not in ("next", "prev", "canonical"):
            self.loads.append(values.get(LOADED[tag], ""))
        elif tag == "a":
            self.links.append(values.get("href", ""))
        if tag in ("pre", "script", "style", "span"):
            self._open.append((tag, values.get("class")))

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1][0] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if not any(tag != "span" or name == "option" for tag, name in self._open):
            self.unmarked += re.findall(r"--[a-z][\w-]*", data)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)

    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path.resolve(): Page(path) for path in site.rglob("*.html")}


def test_every_page_is_built(site: Path) -> None:
    sources = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in ROOT.glob("docs/**/*.md")}

    assert {path for path in sources if not (site / path).exists()} == set()


def test_a_reader_without_a_network_has_all_of_it(site: Path, pages: dict[Path, Page]) -> None:
    loaded = {(path, url) for path, page in pages.items() for url in page.loads if url and path.name != "404.html"}

    assert {url for _, url in loaded if urlsplit(url).scheme or url.startswith("//")} == set()
    assert {url for path, url in loaded if not (path.parent / unquote(urlsplit(url).path)).exists()} == set()


def test_search_works_from_a_file_system(site: Path, pages: dict[Path, Page]) -> None:
    script = (site / "search/search_index.js").read_text("utf-8")
    index = json.loads(script.removeprefix("var __index = "))

    assert {"index.html", "install.html", "reference/api/attnplug.html"} <= {item["location"] for item in index["docs"]}
    assert [url for url in pages[(site / "install.html").resolve()].loads if url.endswith("iframe-worker.js")]


def test_links_and_anchors_lead_somewhere(pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        for url in page.links:
            parts = urlsplit(url)
            if parts.scheme or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in pages[target].anchors):
                broken.append(f"{path.name}: {url}")

    assert broken == []


def test_the_home_page_shows_the_picture(site: Path, pages: dict[Path, Page]) -> None:
    assert "decision" in pages[(site / "index.html").resolve()].classes


def test_a_line_breaks_inside_no_option(site: Path, pages: dict[Path, Page]) -> None:
    marked = [path.name for path, page in pages.items() if "option" in page.classes]

    assert "command-line.html" in marked
    assert {path.name: page.unmarked for path, page in pages.items() if page.unmarked} == {}
    assert ".option { white-space: nowrap; }" in (site / "assets/site.css").read_text("utf-8")


def test_wide_tables_say_that_they_scroll(site: Path, pages: dict[Path, Page]) -> None:
    script = (site / "assets/tables.js").read_text("utf-8")
    theme = "".join(path.read_text("utf-8") for path in site.glob("assets/javascripts/bundle*.js"))

    assert [url for url in pages[(site / "reference/models.html").resolve()].loads if url.endswith("tables.js")]
    # The theme makes the frame that the script looks for, and the script sets the class that the style sheet knows.
    assert {
        name for name in ("md-typeset__scrollwrap", "document$") if name not in theme or name not in script
    } == set()
    assert '"scrolls"' in script
    assert ".scrolls::before" in (site / "assets/site.css").read_text("utf-8")


@in_browser
def test_the_matrix_of_capabilities_works_in_a_browser(site: Path, tmp_path: Path) -> None:
    page = tmp_path / "site" / "reference" / "capabilities.html"  # other tests read every page of the site
    shutil.copytree(site, tmp_path / "site")
    browser = Browser(page)
    run = f"""(() => {{
        {CELLS}[0].click();
        const link = document.querySelector(".detail a");
        return `${{link.textContent}}: ${{document.querySelector(link.hash).textContent}}`;
    }})()"""

    assert browser.found(run, backend="torch/sdpa", device="CPU", status="run").startswith(
        "kit run on cpu: torch/sdpacpu"
    )
    assert (
        browser.found(f"(() => {{ {CELLS}.slice(0, 3).forEach((each) => each.click()); return {OVERFLOW}; }})()", PHONE)
        == "0"
    )
