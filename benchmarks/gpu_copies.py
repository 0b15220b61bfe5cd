"""Copies between a device pool and host memory: checked byte for byte in every way, measured beside a pinned memcpy."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from harness import Report, Result, require

from kvtier.gpu.copies import BlockMove, CopyEngine, Direction
from kvtier.gpu.streams.base import Streams
from kvtier.gpu.streams.cupy_streams import CupyStreams
from kvtier.gpu.streams.launch import Way
from kvtier.gpu.streams.torch_streams import TorchStreams

__all__ = ["check_copies", "every_streams", "measure_copies", "measure_overlap"]

_MIB = 1 << 20
_MOST_BLOCKS = 4096
_PEER = "memcpy of as many contiguous pinned bytes"


def every_streams(device: torch.device) -> Iterator[tuple[str, Callable[[], Streams]]]:
    """Each library's streams with each way to launch copies, by name."""
    makers: dict[str, Any] = {"torch": TorchStreams}
    with contextlib.suppress(ImportError):
        if import_module("cupy").is_available():
            makers["cupy"] = CupyStreams
    for library, maker in makers.items():
        for way in Way:
            yield f"{library}.{way.value}", lambda maker=maker, way=way: maker(device, way)


# ---- checks


def check_copies(streams: Streams, device: torch.device, block_bytes: int = 64 << 10) -> dict[str, int]:
    """Wrong bytes, by what was copied: 0 everywhere."""
    blocks, layers = 48, 8
    values = torch.randint(256, (blocks, block_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pool = values.clone().to(device)
    host = streams.buffer(2 * blocks * block_bytes).reshape(2 * blocks, block_bytes)
    places = np.random.default_rng(0).permutation(2 * blocks)[:blocks]
    slots = [host[place] for place in places]
    wrong = {}
    with contextlib.closing(CopyEngine(pool, streams)) as engine:
        ticket = engine.submit([(at, slot.data) for at, slot in enumerate(slots)], Direction.TO_HOST)
        wrong["to_host"] = blocks - ticket.wait() + _differing(slots, values)

        pool.zero_()
        order = np.random.default_rng(1).permutation(blocks)
        moves = [(int(at), slots[at].data.toreadonly()) for at in order]
        wrong["to_device"] = blocks - engine.submit(moves, Direction.TO_DEVICE).wait() + _differing(pool.cpu(), values)

        pool.zero_()
        moves = [BlockMove(at, slot.data, _inverted) for at, slot in enumerate(slots)]
        wrong["decoded"] = blocks - engine.submit(moves, Direction.TO_DEVICE).wait()
        wrong["decoded"] += _differing(pool.cpu(), 255 - values)

        wrong["layers"] = _check_layers(engine, pool, values, slots, layers)
        wrong["order"] = _check_order(engine, pool, slots)

        # Memory that was not allocated as pinned, and memory that is not pinned at all.
        for name in ("registered", "pageable"):
            memory = np.zeros((blocks, block_bytes), np.uint8)
            if name == "registered":
                wrong[name] = 0 if streams.pin(memory.data.cast("B")) else block_bytes
            pool.copy_(values)
            engine.submit([(at, row.data) for at, row in enumerate(memory)], Direction.TO_HOST).wait()
            wrong[name] = wrong.get(name, 0) + _differing(list(memory), values)
            if name == "registered" and wrong[name] < block_bytes:
                streams.unpin(memory.data.cast("B"))
    return wrong


def _inverted(source: memoryview, target: memoryview) -> None:
    np.subtract(255, np.frombuffer(source, np.uint8), out=np.frombuffer(target, np.uint8))


def _differing(rows: Sequence[np.ndarray] | torch.Tensor, values: torch.Tensor) -> int:
    """Bytes that are not what they should be."""
    found = np.stack([np.asarray(row) for row in rows])
    return int((found != values.numpy()).sum())


def _check_layers(
    engine: CopyEngine, pool: torch.Tensor, values: torch.Tensor, slots: Sequence[np.ndarray], layers: int
) -> int:
    """A layered load, each layer of which is read on the compute stream behind its gate."""
    pool.zero_()
    width = pool.shape[1] // layers
    seen = torch.zeros_like(pool)
    jobs = [[(at, slots[at].data) for at in range(start, len(slots), 2)] for start in (0, 1)]
    tickets, gate = engine.submit_layers(jobs, layers)
    for layer in range(layers):
        gate.wait(layer)
        part = slice(layer * width, (layer + 1) * width)
        seen[:, part].copy_(pool[:, part])
    missing = sum(ticket.total - ticket.wait() for ticket in tickets)
    return missing + _differing(seen.cpu(), values)


def _check_order(engine: CopyEngine, pool: torch.Tensor, slots: Sequence[np.ndarray]) -> int:
    """Saves behind slow computing see its result; loads behind it do not disturb it."""
    wrong, slow = 0, torch.ones(2048, 2048, device=pool.device)
    rounds = 8 if pool.device.type == "cuda" else 1
    for turn in range(rounds):
        for _ in range(16 if pool.device.type == "cuda" else 1):
            slow = slow @ slow / 2048
        pool.fill_(turn + 1)
        engine.submit([(at, slot.data) for at, slot in enumerate(slots)], Direction.TO_HOST).wait()
        wrong += sum(int((slot != turn + 1).sum()) for slot in slots)
        kept = pool.clone()
        engine.submit([(at, slots[-1 - at].data) for at in range(len(slots))], Direction.TO_DEVICE).wait()
        wrong += int((kept != turn + 1).sum())
    return wrong


# ---- measurements


def _wall(run: Callable[[], object], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _median(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    run()
    return statistics.median(_wall(run, device) for _ in range(repeats))


def measure_copies(report: Report, device: torch.device, *, quick: bool) -> None:
    """`gpu.copy.to_host`, `gpu.copy.to_device`: blocks between a pool and scattered slots of a pinned slab."""
    most, repeats = (256 * _MIB, 5) if quick else (1024 * _MIB, 9)
    for block_bytes in (16 << 10, 256 << 10) if quick else (16 << 10, 64 << 10, 256 << 10, 2 * _MIB):
        total = min(most, _MOST_BLOCKS * block_bytes)
        peers = _memcpy_seconds(device, total, repeats)
        for name, make in every_streams(device):
            try:
                _measure_blocks(report, make(), name, block_bytes, peers, repeats, device=device, total=total)
            except Exception as error:  # noqa: BLE001 - another way may be there
                print(f"gpu.copy by {name}: {type(error).__name__}: {error}")


def _memcpy_seconds(device: torch.device, total: int, repeats: int) -> dict[Direction, float]:
    pinned = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    flat = torch.empty(total, dtype=torch.uint8, device=device)
    return {
        Direction.TO_HOST: _median(lambda: pinned.copy_(flat, non_blocking=True), device, repeats),
        Direction.TO_DEVICE: _median(lambda: flat.copy_(pinned, non_blocking=True), device, repeats),
    }


def _measure_blocks(
    report: Report,
    streams: Streams,
    name: str,
    block_bytes: int,
    peers: dict[Direction, float],
    repeats: int,
    *,
    device: torch.device,
    total: int,
) -> None:
    count = total // block_bytes
    pool = torch.zeros(count, block_bytes, dtype=torch.uint8, device=device)
    host = streams.buffer(total).reshape(count, block_bytes)
    order = np.random.default_rng(0).permutation(count)
    moves = [(int(at), host[place].data) for at, place in enumerate(order)]
    with contextlib.closing(CopyEngine(pool, streams)) as engine:
        for direction, peer in peers.items():

            def copy(direction: Direction = direction) -> None:
                require(engine.submit(moves, direction).wait() == count, f"copies {direction.value} failed")

            seconds = _median(copy, device, repeats)
            params = {"block_kib": block_bytes >> 10, "blocks": count, "by": name}
            rate, peer_rate = total / seconds / 1e9, total / peer / 1e9
            report.add(Result(f"gpu.copy.{direction.value}", rate, "GB/s", params, _PEER, peer_rate, rate / peer_rate))


def measure_overlap(report: Report, device: torch.device, streams: Streams, *, quick: bool) -> None:
    """`gpu.load.hidden`: how much of a load's time computing hides that follows it layer by layer."""
    layers, blocks, block_bytes = 32, 128 if quick else 512, 2 * _MIB
    pool = torch.zeros(blocks, block_bytes, dtype=torch.uint8, device=device)
    host = streams.buffer(blocks * block_bytes).reshape(blocks, block_bytes)
    moves = [(at, row.data) for at, row in enumerate(host)]
    x = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    with contextlib.closing(CopyEngine(pool, streams)) as engine:

        def load_all() -> None:
            engine.submit_layers([moves], layers)[0][0].wait()

        load = _median(load_all, device, 5)
        one = _median(lambda: [x @ x for _ in range(100)], device, 5) / 100
        # A layer computes a quarter longer than it loads: as a prefill that is worth overlapping does.
        turns = max(1, round(1.25 * load / layers / one))

        def compute(wait: Callable[[int], None]) -> None:
            for layer in range(layers):
                wait(layer)
                for _ in range(turns):
                    x @ x

        def overlapped() -> None:
            tickets, gate = engine.submit_layers([moves], layers)
            compute(gate.wait)
            tickets[0].wait()

        alone = _median(lambda: compute(set[int]().add), device, 5)
        both = _median(overlapped, device, 5)
    hidden = (alone + load - both) / load
    params = {
        "layers": layers,
        "mib": blocks * block_bytes >> 20,
        "load_ms": round(1e3 * load, 2),
        "compute_ms": round(1e3 * alone, 2),
        "both_ms": round(1e3 * both, 2),
    }
    report.add(Result("gpu.load.hidden", 100 * hidden, "%", params, "load, then compute", 0.0))
