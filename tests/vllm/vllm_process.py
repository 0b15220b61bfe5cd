"""A `Vllm` in a process of its own: calls and answers as lines of JSON."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_HERE = Path(__file__)


class Process:
    """The parent's end. A context manager; at its end the process and its children are killed.

    Args:
        environment: variables that differ from this process's.
        options: of `Vllm`.
    """

    def __init__(self, *, environment: Mapping[str, str] | None = None, **options: Any) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        self.process = subprocess.Popen(
            [sys.executable, str(_HERE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        self._send(options)

    def begun(self) -> Self:
        """Wait until the engine is there."""
        assert self._answer() == "ready"
        return self

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """What `Vllm.method` returns, as JSON has it."""
        self.ask(method, *args, **options)
        return self._answer()

    def ask(self, method: str, *args: Any, **options: Any) -> None:
        """Call a method, and do not wait for it."""
        self._send([method, args, options])

    def close(self) -> None:
        """End the engine as a user's program does, and wait for that."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(60) == 0, self._said()

    def kill(self) -> None:
        """SIGKILL to the process and its children; wait until it is gone."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _send(self, message: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(message), file=self.process.stdin, flush=True)

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended: {self._said()}"
        return json.loads(line)

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]

    def __enter__(self) -> Self:
        try:
            return self.begun()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._log):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


def main() -> None:
    # vLLM writes to standard output, which is the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm_world import Vllm

    with Vllm(**json.loads(sys.stdin.readline())) as vllm:
        print(json.dumps("ready"), file=answers, flush=True)
        for line in sys.stdin:
            method, args, options = json.loads(line)
            print(json.dumps(getattr(vllm, method)(*args, **options)), file=answers, flush=True)


if __name__ == "__main__":
    main()
