"""What docs/rest.md shows can be done, with curl; and it shows all there is."""

import re
import subprocess
from pathlib import Path

from programs import program
from rest_world import running

from kvtier.service.rest.spec import _STATUSES

PAGE = (Path(__file__).parents[3] / "docs" / "rest.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_every_curl_of_the_page_works(tmp_path):
    for name in ("bash", "curl", "xxd"):
        program(name, f"apt-get install {name}")
    calls = [line for script in SCRIPTS for line in script.splitlines() if "curl " in line]
    assert len(calls) > 25
    script = "shopt -s expand_aliases\nset -eu\n" + "\n".join(SCRIPTS)
    with running() as rest:
        script = script.replace("http://127.0.0.1:7700", rest.url)
        done = subprocess.run(
            ["bash", "-c", script], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        rest.at_rest()
    heads = (tmp_path / "heads").read_text()
    told = dict(line.split(": ", 1) for line in heads.splitlines() if ": " in line)
    assert told["kvtier-digest"].startswith("xxh3-128=")
    for answer in (
        '{"outcome":"stored"}',
        '"tiers":["host"]',
        '{"deleted":1}',
        '{"outcomes":["stored"]}',
        "event: stored",
    ):
        assert answer in done.stdout


def test_every_path_and_error_is_on_the_page():
    with running() as rest:
        paths = rest.http.get("/openapi.json").json()["paths"]
    names = {"{ns}": "NS", "{key}": "KEY", "{id}": "ID"}
    assert len(paths) > 25
    for path in paths:
        shown = re.sub(r"\{\w+\}", lambda match: names[match[0]], path)
        # Paths that begin alike share a row.
        last = shown.rsplit("/", 1)[-1]
        assert shown in PAGE or f"`{last}`" in PAGE, path
    rows = PAGE.splitlines()
    for code, status in _STATUSES.items():
        told = "too_large" if status == 431 else code
        assert any(row.startswith(f"| {status} |") and f"`{told}`" in row for row in rows), code
