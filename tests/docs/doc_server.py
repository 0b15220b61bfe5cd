"""A process in which everything is imported already: each command of a page is a fork of it.

`python doc_server.py SOCKET MODEL` listens; `doc_shim.py` is what stands on the PATH as `kvtier` and `python`.
"""

import array
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from doc_model import loading_once

__all__ = ["main"]

PRELOADED = (
    "torch",
    "kvtier.api",
    "kvtier.bench.remote",
    "kvtier.cli.bench",
    "kvtier.cli.demo",
    "kvtier.cli.doctor",
    "kvtier.cli.inspect",
    "kvtier.cli.replay",
    "kvtier.disaggregated",
    "kvtier.doctor.model",
    "kvtier.router.run",
    "kvtier.server.run",
    "kvtier.service.run",
)


def main(place: str, model: str) -> None:
    """Serve until killed; forks have the model loaded."""
    for name in PRELOADED:
        importlib.import_module(name)
    load = loading_once()
    for name in ("kvtier.api", "kvtier.doctor.model"):
        vars(sys.modules[name])["load_model"] = load
    load(model, None, "cpu", "auto")

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(place)
        door.listen(16)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            link, _ = door.accept()
            if os.fork() == 0:
                door.close()
                _wait_for(link)
            link.close()
            _reap()


def _reap() -> None:
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def _wait_for(link: socket.socket) -> None:
    """In a fork: run the command in another one, and say how it ended."""
    size = array.array("i", [0, 0, 0]).itemsize
    head, ancillary, _, _ = link.recvmsg(4, socket.CMSG_SPACE(3 * size))
    files = array.array("i")
    files.frombytes(ancillary[0][2])
    told = bytearray()
    while len(told) < int.from_bytes(head, "big"):
        told += link.recv(1 << 20)
    pid = os.fork()
    if pid == 0:
        link.close()
        _become(json.loads(told), list(files))
    link.sendall(f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    # Nobody waits for the end of a server.
    with suppress(BrokenPipeError):
        link.sendall(f"{os.waitstatus_to_exitcode(status) % 256}\n".encode())
    os._exit(0)


def _become(told: dict[str, Any], files: list[int]) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(told["environ"])
    os.chdir(told["cwd"])
    tempfile.tempdir = None
    program, *arguments = told["argv"]
    code = 1
    try:
        code = _run(_kvtier if program == "kvtier" else _python, arguments)
    except BaseException:  # noqa: BLE001 - the last thing that this process does is to say so
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(program: Callable[[list[str]], int], arguments: list[str]) -> int:
    try:
        return program(arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)


def _kvtier(arguments: list[str]) -> int:
    from kvtier.cli import main as command

    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    return command(arguments)


def _python(arguments: list[str]) -> int:
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    if arguments[:1] == ["-c"]:
        sys.argv = arguments
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
