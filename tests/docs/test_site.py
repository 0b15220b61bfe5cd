"""The site builds without a warning, and whoever reads it talks to nobody else."""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("material", reason="mkdocs-material is not installed")

ROOT = Path(__file__).parents[2]
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Loaded(HTMLParser):
    """What a browser would fetch to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag in LOADS and named.get("rel") not in ("canonical", "next", "prev"):
            self.places.append(named.get(LOADS[tag]) or "")


def pages(site: Path) -> Iterator[Path]:
    return site.rglob("*.html")


def test_every_page_of_the_repository_is_there(site: Path) -> None:
    sources = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    assert [str(name) for name in sources if not (site / name).is_file()] == []
    for name in ("architecture", "results", "examples", "changelog", "contributing"):
        assert (site / f"{name}.html").is_file()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    found = []
    for page in pages(site):
        parser = Loaded()
        parser.feed(page.read_text(encoding="utf-8"))
        found += [f"{page.name}: {place}" for place in parser.places if re.match(r"(https?:)?//", place)]
    assert found == []
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


def test_scripts_and_sources_stay_out(site: Path) -> None:
    assert list(site.rglob("*.py")) == []


def test_links_out_of_docs_lead_to_pages_of_the_site(site: Path) -> None:
    text = (site / "service.html").read_text(encoding="utf-8")
    assert 'href="examples.html#kvtier-cache-service"' in text
    assert 'id="kvtier-cache-service"' in (site / "examples.html").read_text(encoding="utf-8")
