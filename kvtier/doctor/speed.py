"""Is loading from a tier faster than computing again? A sample goes through real tiers of its own and back."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple

import numpy as np

from kvtier.cost import LoadOrRecompute, Run, TierSpeed
from kvtier.cpu import HostTier
from kvtier.doctor.disk import scratch
from kvtier.doctor.findings import Finding, Subject, ok, problem, shown_size, warning
from kvtier.errors import CorruptObject, TierFull
from kvtier.keys import Chain, Namespace, namespace_index, store_keys
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.tiers import BlockRef, Handle, Status, Tier

__all__ = ["Sample", "measure", "speed"]

_SAMPLE_BYTES = 32 << 20
_FEWEST, _MOST = 4, 256
_BLOCK_BYTES = 1 << 20  # where the model's own is unknown
_REPEATS = 3
_WAIT = 60.0


class Sample(NamedTuple):
    """Blocks of one chain in a namespace that nobody else has, and their bytes, incompressible."""

    refs: tuple[BlockRef, ...]
    data: tuple[memoryview, ...]
    tokens: int

    @property
    def nbytes(self) -> int:
        """Of all blocks."""
        return sum(block.nbytes for block in self.data)


def _sample(subject: Subject) -> Sample:
    nbytes = subject.model.block_bytes if subject.model else _BLOCK_BYTES
    size = subject.config.engine.block_size
    count = min(max(_SAMPLE_BYTES // nbytes, _FEWEST), _MOST)
    chain = Chain(size)
    chain.extend(range(count * size))
    space = Namespace("doctor", hashlib.sha256(b"speed").digest())
    keys = store_keys(chain.keys, space.mask())
    ns = namespace_index(space.digest)
    refs = tuple(BlockRef(key, ns, at, keys[at - 1] if at else None, exact=True) for at, key in enumerate(keys))
    dice = np.random.default_rng(0)
    return Sample(refs, tuple(dice.integers(0, 256, nbytes, np.uint8).data for _ in refs), count * size)


def measure(tier: Tier, sample: Sample) -> TierSpeed:
    """Write a sample, read it back, compare every byte.

    Returns:
        The speed of the best of some reads, and the time to the first block alone.

    Raises:
        TierFull: the tier did not take it.
        CorruptObject: it did not come back as it was.
    """
    _write(tier, sample)
    buffers = [memoryview(bytearray(block.nbytes)) for block in sample.data]
    latency = min(_read(tier, sample, buffers, 1) for _ in range(_REPEATS))
    best = min(_read(tier, sample, buffers, len(sample.refs)) for _ in range(_REPEATS))
    if any(buffer != block for buffer, block in zip(buffers, sample.data, strict=True)):
        raise CorruptObject(f"tier {tier.name} gave back other bytes than it got: this machine cannot be trusted")
    first = sample.data[0].nbytes
    return TierSpeed(sample.nbytes / best, max(0.0, latency - first * best / sample.nbytes), 0)


def _write(tier: Tier, sample: Sample) -> None:
    sizes = [block.nbytes for block in sample.data]
    results = tier.reserve(sample.refs, sizes, ["raw"] * len(sizes), "doctor")
    slots = [result for result in results if isinstance(result, Handle)]
    statuses = tier.write(list(zip(slots, sample.data, strict=False))).wait(_WAIT).statuses
    if len(slots) < len(sizes) or set(statuses) != {Status.OK}:
        tier.abort(slots)
        raise TierFull(f"tier {tier.name} did not take a sample of {shown_size(sample.nbytes)}")
    tier.commit(slots)


def _read(tier: Tier, sample: Sample, buffers: Sequence[memoryview], count: int) -> float:
    """Seconds from the look-up to the last verified byte of the first `count` blocks."""
    start = time.perf_counter()
    handles = tier.acquire([ref.key for ref in sample.refs[:count]], "doctor").wait(_WAIT).handles
    statuses = tier.read(list(zip(handles, buffers, strict=False))).wait(_WAIT).statuses
    seconds = time.perf_counter() - start
    tier.release(handles)
    if statuses != (Status.OK,) * count:
        raise CorruptObject(f"tier {tier.name} lost blocks of a sample that it had just taken")
    return seconds


@contextmanager
def _nvme(subject: Subject, sample: Sample) -> Iterator[NvmeTier]:
    nvme = subject.config.tiering.nvme
    assert nvme is not None  # noqa: S101 - `speed` asks only then
    # Two pages more per block: records take whole pages, in files that are cut at their own ends.
    capacity = max(2 << 20, sample.nbytes + (len(sample.refs) << 13))
    options = NvmeOptions(io_threads=nvme.io_threads, min_free_bytes=0, durable=nvme.durable)
    with scratch(nvme) as place, closing(NvmeTier(place / "tier", capacity, options)) as tier:
        yield tier


def speed(subject: Subject) -> Iterator[Finding]:
    """Measures each tier, and asks the model of the connector whether it would load from it."""
    tiering, sample = subject.config.tiering, _sample(subject)
    if tiering.host is None:
        return
    with closing(HostTier(sample.nbytes + (len(sample.refs) << 12))) as host:
        yield _verdict(subject, "host", measure(host, sample), sample)
    if tiering.nvme is not None:
        with _nvme(subject, sample) as nvme:
            yield _verdict(subject, "nvme", measure(nvme, sample), sample)


def _verdict(subject: Subject, name: str, found: TierSpeed, sample: Sample) -> Finding:
    rate, model = subject.prefill_tokens_per_second, subject.model
    what = f"{name} reads {shown_size(found.bytes_per_second or 0)}/s"
    if model is None or rate is None:
        return warning(
            "speed",
            f"{what}, and whether that beats computing again is not known",
            "give --prefill-rate and a model whose files are here",
        )
    decision = LoadOrRecompute().decide([Run(name, sample.nbytes, sample.tokens)], {name: found}, rate)
    needed = f"break-even at {rate:.4g} tokens/s of prefill is {shown_size(rate * model.token_bytes)}/s"
    if decision.load_tokens < sample.tokens:
        return problem(
            "speed",
            f"{what}; {needed}: computing again is faster",
            f"switch tiering.{name} off, or use a faster medium",
        )
    gain = (decision.recompute_seconds or 0.0) / max(decision.load_seconds, 1e-9)
    return ok("speed", f"{what}, {gain:.1f} times as fast as computing again; {needed}")
