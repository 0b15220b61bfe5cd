"""The processes of benchmarks/adapters.py: one vLLM each, that sleeps (SIGSTOP) while another one's turn is."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness import Cost

__all__ = ["LABELS", "Answer", "Peer", "missing", "model_path"]

_BUILD = Path(__file__).parents[1] / "build"
_VLLM = _BUILD / "vllm-venv/bin/python"
_LMCACHE = _BUILD / "lmcache-vllm-venv/bin/python"

LABELS = {
    "none": "vLLM 0.32.0 alone",
    "native": "vLLM 0.32.0 native host",
    "native_fs": "vLLM 0.32.0 native host + fs",
    "secondary": "vLLM 0.32.0 native host over kvtier's NVMe tier",
    "kvtier": "kvtier",
    "lmcache": "LMCache 0.5.6, our CPU copies patched in, chunk 256",
    "lmcache_fine": "LMCache 0.5.6, our CPU copies patched in, chunk 32",
}

Prompts = Sequence[Sequence[int]]


def _python(side: str) -> Path:
    return _LMCACHE if side.startswith("lmcache") else _VLLM


def missing(side: str) -> str | None:
    """Why a side cannot be measured here, or None."""
    where = "requirements-vllm.txt" if _python(side) == _VLLM else "adapters.py"
    return None if _python(side).exists() else f"{LABELS[side]} (not installed: see benchmarks/{where})"


def model_path() -> Path:
    """The default model, fetched on first use."""
    from kvtier.engine.models.catalog import cache_dir, fetch_default_model  # noqa: PLC0415

    return fetch_default_model(cache_dir(), lambda *_: None)


@dataclass(frozen=True)
class Answer:
    """What came of one batch of prompts. `cached`: prompt tokens that were not computed. `steps`: of the engine."""

    seconds: float
    cpu_seconds: float
    tokens: Sequence[Sequence[int]]
    cached: Sequence[int]
    loaded_bytes: int
    steps: int

    @property
    def cost(self) -> Cost:
        """For `harness.Rounds`."""
        return Cost(self.seconds, self.cpu_seconds)


class Peer:
    """One vLLM with one connector, in a process of its own, asleep between calls. A context manager.

    Args:
        side: a key of `LABELS`.
        directory: for its blocks, emptied before unless `keep`, and its log.
        threads: of its kernels.
        options: of `adapters_peer.Engine`.
    """

    def __init__(self, side: str, directory: Path, threads: int, *, keep: bool = False, **options: Any) -> None:
        self.side = side
        self.directory = directory / side
        if not keep:
            shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / f"adapters-{side}.log"
        given = {"side": side, "model": str(model_path()), "directory": str(self.directory), **options}
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [str(_python(side)), str(Path(__file__).with_name("adapters_peer.py")), json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONHASHSEED": "0"},
            )

    def __enter__(self) -> Self:
        try:
            self._answer()
        except BaseException:
            self.kill()
            raise
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def generate(self, prompts: Prompts, output: int = 1) -> Answer:
        """All prompts at once."""
        return Answer(**self.call("generate", prompts, output))

    def call(self, method: str, *args: Any) -> Any:
        """A method of `adapters_peer.Engine`, with nobody else awake."""
        with self._awake():
            self._send(method, *args)
            return self._answer()

    def send_and_kill(self, method: str, *args: Any) -> Any:
        """A call, and SIGKILL at the instant of its answer."""
        self._signal(signal.SIGCONT)
        self._send(method, *args)
        answer = self._answer()
        self.kill()
        return answer

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone, with the host memory that vLLM's tiering leaves behind."""
        self._process.kill()
        self._process.communicate()
        for path in Path("/dev/shm").glob(f"vllm_offload_adapters-{self._process.pid}*"):
            path.unlink()

    def close(self) -> None:
        """End as a user's program ends."""
        self._signal(signal.SIGCONT)
        self._process.communicate()

    @contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        yield
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        self._process.send_signal(number)

    def _send(self, method: str, *args: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps([method, *args]), file=self._process.stdin, flush=True)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{LABELS[self.side]} ended: see {self.log}")
        return json.loads(line)
