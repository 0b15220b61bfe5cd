"""What docs/server.md shows can be done."""

import json
import re
import shlex
from pathlib import Path

from server_world import RunningServer, tiny_llm

PAGE = (Path(__file__).parents[3] / "docs" / "server.md").read_text(encoding="utf-8")


def test_every_curl_of_the_page_works(monkeypatch):
    calls = re.findall(r"^curl (?:.|\n)+?'(?=\n)", PAGE, re.MULTILINE)
    assert len(calls) == 3
    running = RunningServer(tiny_llm(monkeypatch), "SmolLM2-135M-Instruct")
    try:
        for call in calls:
            arguments = shlex.split(call)
            url = next(one for one in arguments if one.startswith("http://127.0.0.1:8000/"))
            assert "Content-Type: application/json" in arguments
            body = json.loads(arguments[arguments.index("-d") + 1])
            response = running.post(url.removeprefix("http://127.0.0.1:8000"), **body)
            assert response.status_code == 200, response.text
    finally:
        running.stop()


def test_every_path_is_on_the_page(server):
    paths = server.get("/openapi.json").json()["paths"]
    assert [path for path in paths if path.replace("{name}", "NAME") not in PAGE] == []
