"""A worker half in its own process: attaches to the owner's regions, obeys plans that arrive over a socket."""

import socket
import sys

import msgspec
import torch

from kvtier.connector import TierWorker
from kvtier.cpu import recv_regions
from kvtier.hooks import TransferPlan


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    blocks, block_bytes = int(sys.argv[2]), int(sys.argv[3])
    worker = TierWorker(recv_regions(sock))
    pool = torch.zeros(blocks, block_bytes, dtype=torch.uint8)
    worker.register_pool(pool)
    decoder = msgspec.msgpack.Decoder(TransferPlan)
    stream = sock.makefile("rwb")
    while head := stream.read(4):
        plan = decoder.decode(stream.read(int.from_bytes(head, "little")))
        worker.begin(plan)
        # "The forward": every block that a save names is filled with its own number.
        for saves in plan.saves.values():
            for save in saves:
                pool[save.block_id] = save.block_id
        results = worker.end()
        reply = msgspec.msgpack.encode((results, [int(row[0]) if (row == row[0]).all() else -1 for row in pool]))
        stream.write(len(reply).to_bytes(4, "little") + reply)
        stream.flush()
    worker.close()


if __name__ == "__main__":
    main()
