# ruff: noqa: PTH109, PTH110, PTH123
"""Stands on the PATH of a page as `kvtier` and `python`: asks `doc_server.py` to run what it was asked to run.
It starts in milliseconds, hence without pathlib.

    python -SE doc_shim.py SOCKET NAME ARGUMENTS

A command that serves until it is stopped is left running once it says that it listens, as a reader would do in another
terminal; one that is started again on the same port is ended first. Its pid is in the file `$DOC_SERVERS`.
"""

import array
import json
import os
import signal
import socket
import sys
import time

__all__ = ["main"]

SERVERS = (["serve"], ["cache", "serve"], ["router"], ["prefill"])
OPTIONS = ("--config", "--log-level")
PATIENCE = 60.0


def main(place: str, argv: list[str]) -> int:
    """Run a command; its exit code."""
    words = list(argv[1:])
    while words and words[0] in OPTIONS:
        del words[:2]
    kind = next((one for one in SERVERS if words[: len(one)] == one), None)
    if argv[0] != "kvtier" or kind is None or {"-h", "--help"} & set(words):
        link, pid = ask(place, argv, [0, 1, 2])
        for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(one, lambda number, _: os.kill(pid, number))
        return int(link.readline() or 1)
    return start(place, argv, " ".join([*kind, *port_of(words)]))


def ask(place: str, argv: list[str], files: list[int]) -> tuple["object", int]:
    link = socket.socket(socket.AF_UNIX)
    link.connect(place)
    told = json.dumps({"argv": argv, "cwd": os.getcwd(), "environ": dict(os.environ)}).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    link.sendmsg([len(told).to_bytes(4, "big") + told], rights)
    answers = link.makefile("rb")
    return answers, int(answers.readline())


def start(place: str, argv: list[str], key: str) -> int:
    """Start a server and wait until it listens."""
    book = os.environ["DOC_SERVERS"]
    for pid, known in entries(book):
        if known == key:
            stop(pid)
    log = f"{book}.{time.monotonic_ns()}.log"
    with open(log, "wb") as file, open(os.devnull, "rb") as nothing:
        _, pid = ask(place, argv, [nothing.fileno(), file.fileno(), file.fileno()])
    with open(book, "a") as lines:
        lines.write(f"{pid} {key}\n")
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and alive(pid):
        with open(log) as file:
            # The cache service opens its data port first.
            if any(" listening url=" in line or " listens socket=" in line for line in file):
                return 0
        time.sleep(0.03)
    with open(log) as file:
        sys.stderr.write(file.read())
    return 1


def entries(book: str) -> list[tuple[int, str]]:
    if not os.path.exists(book):
        return []
    with open(book) as lines:
        return [(int(line.split(" ", 1)[0]), line.split(" ", 1)[1].rstrip("\n")) for line in lines]


def stop(pid: int) -> None:
    end = time.monotonic() + 10
    while alive(pid):
        os.kill(pid, signal.SIGTERM if time.monotonic() < end else signal.SIGKILL)
        for _ in range(100):
            if not alive(pid):
                break
            time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2][:1] != "Z"
    except OSError:
        return False


def port_of(words: list[str]) -> list[str]:
    named = "--socket" if words[0] == "prefill" else "--port"
    return [words[at + 1] for at, word in enumerate(words[:-1]) if word == named]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
