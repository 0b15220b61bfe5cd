"""The fenced blocks of the pages, with what the comments before them say about trying them.

<!-- test: skip: why -->            it cannot run here
<!-- test: elsewhere: path -->      another test runs it, or this is shown by it
<!-- test: setup: code -->          runs before it, in its language; pages show what readers have already
<!-- test: output: of what -->      a text whose figures the block before it printed
"""

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["LANGUAGES", "PAGES", "ROOT", "Block", "blocks_of"]

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", *(path for path in (ROOT / "docs").rglob("*.md"))], key=lambda path: path.relative_to(ROOT)
)
LANGUAGES = frozenset({"bash", "console", "python", "toml", "json", "yaml", "text"})

TOLD = {
    "README.md": [
        ("make demo", "skip", "sets up environments of its own; continuous integration runs it"),
        (
            "last_turn",
            "setup",
            'import os; os.environ["KVTIER_ENGINE__MAX_MODEL_LEN"] = "24"\n'
            'prompt = last_turn = "The harbour opens at six."',
        ),
    ],
    "docs/client.md": [("", "elsewhere", "tests/unit/client/test_client_docs.py")],
    "docs/vllm.md": [
        (text, "skip", "needs vLLM, which has an environment of its own: make test-vllm")
        for text in ("vllm serve", "cached_by_source")
    ],
    "docs/rest.md": [("", "elsewhere", "tests/unit/service_rest/test_rest_docs.py")],
}
"""The same for pages that are better without comments: of each block in which a text occurs."""

_FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
_TOLD = re.compile(r"((?:<!-- test: (?:(?!-->).)*-->\s*)+)\Z", re.DOTALL)
_ONE = re.compile(r"<!-- test: (skip|elsewhere|setup|output): (.*?) -->", re.DOTALL)


class Block(NamedTuple):
    """One fenced block. told: what the comments say, by their kind."""

    page: Path
    line: int
    language: str
    text: str
    told: dict[str, str]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether it is run here."""
        return self.language in ("bash", "python") and not {"skip", "elsewhere"} & self.told.keys()


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    """All of a page, in order."""
    source = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(source):
        before = _TOLD.search(source[: match.start()])
        told = dict(_ONE.findall(before[1])) if before else {}
        told |= {kind: text for part, kind, text in TOLD.get(_name(page), ()) if part in match["text"]}
        lines = match["text"].splitlines(keepends=True)
        text = "".join(line.removeprefix(match["indent"]) for line in lines)
        found.append(Block(page, source.count("\n", 0, match.start()) + 1, match["language"], text, told))
    return found
