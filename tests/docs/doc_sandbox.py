"""Where the blocks of one page run, as they are written: a home, a checkout, ports and places of their own.

Nothing of a block is changed but the names of ports and of directories outside the checkout, which other programs of
this machine may have, and the `&` behind a server, which the shim leaves running anyway.
"""

import importlib.metadata
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import doc_shim
from doc_blocks import ROOT, Block

__all__ = ["PLACES", "PORTS", "Preloaded", "Sandbox"]

PORTS = (5557, 5558, 5567, 5568, 7700, 7701, 8000, 8001, 8002, 8080, 9000)
PLACES = (
    "/dev/shm/kv",
    "/etc/kvtier",
    "/models",
    "/run/kvtier",
    "/run/user/1000",
    "/var/cache/kvtier",
    "/var/lib/kvtier",
    "/var/tmp/kvtier",
)
_FOLDERS = ("adapters", "benchmarks", "docs", "examples", "kvtier", "tests")
_SERVER = re.compile(r"^(.*\bkvtier\b.*\b(?:serve|router|prefill)\b.*?) &$", re.MULTILINE)


class Preloaded:
    """The process that commands are forks of."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.place = folder / "door"
        command = [sys.executable, str(Path(__file__).with_name("doc_server.py")), str(self.place), str(model)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class Sandbox:
    """For the blocks of one page, from first to last."""

    def __init__(self, preloaded: Preloaded, model: Path, models: Path) -> None:
        # Short: the path of a Unix socket has 107 bytes.
        self.top = Path(tempfile.mkdtemp(prefix="kvdoc-"))
        self.home = self.top / "home"
        self.work = self.top / "work"
        for folder in (self.home, self.work, self.top / "bin", *(self._place(place) for place in PLACES)):
            folder.mkdir(parents=True)
        for name in _FOLDERS:
            (self.work / name).symlink_to(ROOT / name)
        self._place("/models/my-model").symlink_to(model)
        self._taken = {port: _free_port() for port in PORTS}
        self._names: dict[str, Any] = {"__name__": "__page__"}
        for name in ("kvtier", "python"):
            self._write_shim(name, preloaded.place)
        self._write_pip()
        self.environ = self._environment(models)

    def _place(self, place: str) -> Path:
        return self.top / place.lstrip("/")

    def _write_shim(self, name: str, door: Path) -> None:
        shim = self.top / "bin" / name
        script = Path(__file__).with_name("doc_shim.py")
        shim.write_text(f'#!/bin/sh\nexec {sys.executable} -SE {script} {door} {name} "$@"\n')
        shim.chmod(0o755)

    def _write_pip(self) -> None:
        """What is installed is installed already: only that there are such extras is looked at."""
        known = {"kvtier", *importlib.metadata.metadata("kvtier").get_all("Provides-Extra", ())}
        script = self.top / "bin" / "pip"
        lines = ["#!/bin/sh", 'for one in $(echo "$*" | tr "[],\'" "    "); do case "$one" in']
        lines += [f"install|{'|'.join(sorted(known))}) ;;", '*) echo "no extra $one"; exit 1;;', "esac; done"]
        script.write_text("\n".join(lines) + "\n")
        script.chmod(0o755)

    def _environment(self, models: Path) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TRITON_INTERPRET") if name in os.environ}
        return kept | {
            "PATH": f"{self.top / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "TMPDIR": str(self.top),
            "COLUMNS": "120",
            "OMP_NUM_THREADS": "1",
            "DOC_SERVERS": str(self.top / "servers"),
            "KVTIER_CACHE_DIR": str(models),
            "KVTIER_SERVER__PORT": str(self._taken[8000]),
            "KVTIER_SERVICE__PORT": str(self._taken[7700]),
            "KVTIER_SERVICE__DATA_PORT": str(self._taken[7701]),
            "KVTIER_ROUTER__PORT": str(self._taken[8080]),
        }

    def written(self, text: str) -> str:
        """A text of the page, with this sandbox's ports and places."""
        text = text.replace("kvtier://127.0.0.1\n", "kvtier://127.0.0.1:7701\n")
        text = re.sub(r"kvtier://127\.0\.0\.1(?=[\s\"'])", "kvtier://127.0.0.1:7701", text)
        for place in PLACES:
            text = re.sub(rf"(?<![\w./]){place}\b", str(self._place(place)), text)
        return re.sub(r"(?<![\w.])\d{4}(?![\w.])", lambda match: str(self._taken.get(int(match[0]), match[0])), text)

    def run(self, block: Block) -> str:
        """Run one block, after what sets it up; what it printed.

        Raises:
            AssertionError: it failed.
        """
        parts = [block.told["setup"]] if "setup" in block.told else []
        text = self.written("\n".join([*parts, block.text]))
        return self._bash(block, text) if block.language == "bash" else self._python(block, text)

    def _bash(self, block: Block, text: str) -> str:
        script = "shopt -s expand_aliases\nset -eu\n" + _SERVER.sub(r"\1", text)
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.work,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, f"{block} ended with {done.returncode}:\n{done.stdout[-4000:]}"
        return done.stdout

    def _python(self, block: Block, text: str) -> str:
        # Compiled with its place on the page, so that a traceback points there.
        code = compile("\n" * block.line + text, str(block.page), "exec")
        exec(code, self._names)
        return ""

    def environment_of_python(self) -> Mapping[str, str]:
        """What Python blocks, which run in this process, find in `os.environ`."""
        return {name: value for name, value in self.environ.items() if name not in ("PATH", "DOC_SERVERS")}

    def close(self) -> None:
        """End every server, remove everything."""
        for one in list(self._names.values()):
            if callable(getattr(one, "close", None)) and not isinstance(one, type | ModuleType):
                one.close()
        for pid, _ in doc_shim.entries(self.environ["DOC_SERVERS"]):
            if doc_shim.alive(pid):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.top, ignore_errors=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
