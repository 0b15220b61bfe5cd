# ruff: noqa: INP001 - loaded by MkDocs by its path
"""What the site has beside docs/: pages that live elsewhere in the repository, under the links that lead to them there.

On disk, links are relative to the files that hold them, so that they can be followed in any viewer of the repository.
Here they are turned into links of the site; one that leads nowhere is left, and MkDocs complains.
"""

import os
import re
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ["on_files", "on_page_markdown"]

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "architecture.md": "ARCHITECTURE.md",
    "results.md": "benchmarks/RESULTS.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security-policy.md": "SECURITY.md",
    "traces.md": "tests/data/traces/README.md",
    "license.md": "LICENSE",
    "examples.md": "examples/README.md",
}
"""Pages of the site, and the files that they are made of."""

_SAME = {origin: page for page, origin in ELSEWHERE.items()} | {
    "README.md": "index.md",
    "changes": "changelog.md",
    "examples": "examples.md",
}
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2`*~* *$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that live elsewhere."""
    for page, origin in ELSEWHERE.items():
        files.append(File.generated(config, page, content=_text(ROOT / origin)))
    return files


def _text(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.parent.name == "examples":
        return text + _examples(path.parent)
    return text if path.suffix == ".md" else f"# License\n\n```text\n{text}```\n"


def _examples(folder: Path) -> str:
    """Every example, as it is."""
    lines = [""]
    kinds = {".py": "python", ".sh": "bash", ".service": "ini", ".toml": "toml", ".yaml": "yaml"}
    shown = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in (".md", ".pyc"))
    for path in shown:
        name = path.relative_to(folder).as_posix()
        kind = kinds.get(path.suffix, "text")
        lines.append(f"## {name} {{ #{_anchor(name)} }}\n")
        lines.append(f"````{kind}\n{path.read_text(encoding='utf-8').rstrip()}\n````\n")
    return "\n".join(lines)


def _anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of one page into the site's."""
    name = page.file.src_uri
    origin = ELSEWHERE.get(name, f"docs/{name}")
    kept: list[str] = []

    def hide(match: re.Match[str]) -> str:
        kept.append(match[0])
        return f"\0{len(kept) - 1}\0"

    text = _FENCE.sub(hide, markdown)
    for target in {match[2] for match in _LINK.finditer(text)}:
        _add_source(_place(target, origin), config, files)
    text = _LINK.sub(lambda match: f"{match[1]}{_linked(match[2], origin, name)}{match[3]}", text)
    return re.sub(r"\0(\d+)\0", lambda match: kept[int(match[1])], text)


def _place(target: str, origin: str) -> str:
    """What a link of a file leads to, from the root of the repository; nothing where it leads out of it."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc or not parts.path:
        return ""
    return os.path.normpath(PurePosixPath(origin).parent / parts.path)


def _is_source(place: str) -> bool:
    shown = place in _SAME or place.startswith(("docs/", "examples/"))
    return bool(place) and not shown and (ROOT / place).is_file()


def _add_source(place: str, config: MkDocsConfig, files: Files) -> None:
    """A file of the repository that a page leads to is shown as it is."""
    if _is_source(place) and files.get_file_from_path(f"source/{place}.txt") is None:
        files.append(File.generated(config, f"source/{place}.txt", abs_src_path=str(ROOT / place)))


def _linked(target: str, origin: str, name: str) -> str:
    place = _place(target, origin)
    if not place:
        return target
    parts = urlsplit(target)
    fragment = f"#{parts.fragment}" if parts.fragment else ""
    if place in _SAME:
        page = _SAME[place]
    elif place.startswith("examples/"):
        page, fragment = "examples.md", f"#{_anchor(place.removeprefix('examples/'))}"
    elif _is_source(place):
        page, fragment = f"source/{place}.txt", ""
    elif place.startswith("docs/"):
        page = place.removeprefix("docs/")
    else:
        return target
    return os.path.relpath(page, PurePosixPath(name).parent) + fragment
