"""What docs/client.md shows runs against a real service, and it names every error and verb."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from client_world import serving

from kvtier.client import AsyncClient, Client, errors

PAGE = (Path(__file__).parents[3] / "docs/client.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_every_block_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(BLOCKS) > 4
    with serving(tmp_path) as service:
        for block in BLOCKS:
            exec(compile(block.replace("http://127.0.0.1:7700", service.url), "docs/client.md", "exec"), {})
        service.rest.at_rest()
    told = capsys.readouterr().out
    for line in (
        "b'some bytes' host",
        "3 of 3 blocks are there: ('host', 'host', 'host')",
        "['model', 'notes']",
        "Unreachable http://127.0.0.1:1",
        "are in host",
    ):
        assert line in told, told


def test_every_error_is_on_the_page() -> None:
    assert all(f"`{name}`" in PAGE for name in errors.__all__ if name not in ("ClientError", "refused"))


def test_both_clients_have_the_same_verbs() -> None:
    def verbs(kind: type) -> dict[str, list[str]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(one).parameters) for name, one in found if not name.startswith("_")}

    assert verbs(Client) == verbs(AsyncClient)


def test_clients_need_neither_torch_nor_a_server() -> None:
    heavy = {"torch", "fastapi", "uvicorn"}
    code = f"import sys; from kvtier.client import AsyncClient, Client; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
