"""Every fenced block of README.md and docs/ does what it says: Python and shell run, TOML and JSON are accepted.

A block that is not run says why, and is counted in `SKIPPED`, so that nobody skips one by accident.
"""

import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import LANGUAGES, PAGES, ROOT, Block, blocks_of
from doc_model import loading_once
from doc_sandbox import Preloaded, Sandbox
from programs import program

from kvtier import api
from kvtier.config import load_config, settings
from kvtier.engine.models.catalog import cache_dir

BLOCKS = {page: blocks_of(page) for page in PAGES}
SECTIONS = {name.partition(".")[0] for name in settings()}
FIGURE = re.compile(r"\d[\d.,]*")
SKIPPED: dict[str, int] = {"README.md": 1, "docs/sglang.md": 1, "docs/start.md": 1, "docs/vllm.md": 2}
"""Blocks of each page that say why they are skipped."""


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def every(language: str) -> list[Block]:
    return [
        block
        for blocks in BLOCKS.values()
        for block in blocks
        if block.language == language and not {"skip", "elsewhere"} & block.told.keys()
    ]


def test_what_is_skipped_is_meant_to_be() -> None:
    told = [name(block.page) for blocks in BLOCKS.values() for block in blocks if "skip" in block.told]
    assert dict(Counter(told)) == SKIPPED


def test_what_is_run_elsewhere_is_run_there() -> None:
    missing = []
    for page, blocks in BLOCKS.items():
        for block in (block for block in blocks if "elsewhere" in block.told):
            test = ROOT / block.told["elsewhere"]
            if not test.is_file() or page.name not in test.read_text(encoding="utf-8"):
                missing.append(str(block))
    assert missing == []


def test_what_a_terminal_showed_says_where_it_is_tried() -> None:
    shown = [block for blocks in BLOCKS.values() for block in blocks if block.language == "console"]
    assert [str(block) for block in shown if not {"skip", "elsewhere"} & block.told.keys()] == []


def test_languages_are_known() -> None:
    strange = [str(block) for blocks in BLOCKS.values() for block in blocks if block.language not in LANGUAGES | {""}]
    assert strange == []


@pytest.mark.parametrize("block", every("toml"), ids=str)
def test_settings_are_accepted(block: Block) -> None:
    values = tomllib.loads(block.text)
    if "project" not in values:
        assert set(values) <= SECTIONS, "a table of something else needs a test elsewhere"
        load_config(values, environ={}, search=False)


@pytest.mark.parametrize("block", every("json"), ids=str)
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Preloaded]:
    one = Preloaded(tmp_path_factory.mktemp("d"), default_model)
    yield one
    one.stop()


@pytest.fixture(scope="module")
def load_model() -> Callable[..., Any]:
    return loading_once()


@pytest.fixture
def sandbox(
    preloaded: Preloaded, default_model: Path, load_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Sandbox]:
    one, before = Sandbox(preloaded, default_model, cache_dir()), dict(os.environ)
    for variable, value in one.environment_of_python().items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(api, "load_model", load_model)
    monkeypatch.chdir(one.work)
    yield one
    # What a page's blocks set ends with the page.
    os.environ.clear()
    os.environ.update(before)
    one.close()


RUNNING = [page for page, blocks in BLOCKS.items() if any(block.runs for block in blocks)]


@pytest.mark.model
@pytest.mark.timeout(300)  # several servers, on a machine that others use, too
@pytest.mark.parametrize("page", RUNNING, ids=name)
def test_page_runs(page: Path, sandbox: Sandbox) -> None:
    program("bash", "apt-get install bash")
    program("curl", "apt-get install curl")
    printed = ""
    for block in BLOCKS[page]:
        if block.runs:
            os.chdir(sandbox.work)
            printed = sandbox.run(block)
        elif "output" in block.told:
            assert set(FIGURE.findall(block.text)) <= set(FIGURE.findall(printed)), (
                f"{block}: another output:\n{printed}"
            )
