"""A reader and writer in its own process: attaches to regions by descriptor, answers on the same socket."""

import json
import mmap
import os
import socket
import sys

from kvtier.cpu import recv_regions
from kvtier.layout import Span


def try_to_write(view: memoryview) -> str:
    try:
        view[0] = 255
    except TypeError as error:
        return str(error)
    return "written"


def try_to_map_writable(path: str, nbytes: int) -> str:
    """Reopen the region's file for writing, as a hostile worker of the same user could."""
    try:
        fd = os.open(path, os.O_RDWR)
        mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        return type(error).__name__
    return "mapped"


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    regions = recv_regions(sock)
    with sock.makefile("rw") as stream:
        plan = json.loads(stream.readline())
        source, target = Span(*plan["source"]), Span(*plan["target"])
        block = regions[source.region].view(source)
        answer = {
            "block": bytes(block).hex(),
            "write": try_to_write(block),
            "remap": try_to_map_writable(f"/proc/{plan['owner']}/fd/{plan['fd']}", regions[source.region].nbytes),
            "torch": "torch" in sys.modules,
        }
        regions[target.region].view(target)[:] = bytes(block)[::-1]
        stream.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
