"""Batches of the host tier: their checks, and the windows in which they are worked through."""

from collections.abc import Iterable, Iterator, Sequence

from kvtier.errors import FormatMismatch
from kvtier.hints import Hint
from kvtier.keys import STORE_KEY_BYTES
from kvtier.tiers import BlockRef, Handle, Status

__all__ = ["check_buffers", "check_records", "leading", "rest", "windows"]

_FMT_CHARS = 16  # the width that `block_checksum` gives a format id
_WINDOW_BYTES = 4 << 20  # what is copied or verified in one call, between two looks at the clock


def leading(statuses: Iterable[Status]) -> list[Status]:
    """Statuses up to and including the first that is not OK."""
    found: list[Status] = []
    for status in statuses:
        found.append(status)
        if status is not Status.OK:
            break
    return found


def rest(statuses: Sequence[Status]) -> Status:
    """The status of what follows a run that ended with these."""
    return Status.TIMEOUT if statuses[-1:] == [Status.TIMEOUT] else Status.MISS


def windows(handles: Sequence[Handle]) -> Iterator[slice]:
    """Consecutive handles, at least one and about `_WINDOW_BYTES` at a time."""
    start = nbytes = 0
    for at, handle in enumerate(handles, 1):
        nbytes += handle.nbytes
        if nbytes >= _WINDOW_BYTES:
            yield slice(start, at)
            start, nbytes = at, 0
    if start < len(handles):
        yield slice(start, len(handles))


def check_buffers(items: Iterable[tuple[Handle, memoryview]], *, writable: bool) -> None:
    """Let buffers pass that have room for their records.

    Raises:
        FormatMismatch: one has not.
    """
    for handle, data in items:
        if data.nbytes < handle.nbytes or not data.c_contiguous or (writable and data.readonly):
            kind = "writable, contiguous" if writable else "contiguous"
            raise FormatMismatch(
                f"buffer of {data.nbytes} bytes (contiguous={data.c_contiguous}, readonly={data.readonly}): "
                f"this block needs a {kind} one of at least {handle.nbytes} bytes"
            )


def check_records(refs: Sequence[BlockRef], sizes: Sequence[int], fmts: Sequence[str], hints: Sequence[Hint]) -> None:
    """Let records pass that a tier can have.

    Raises:
        FormatMismatch: a size, format or key that no record can have, or not as many of each.
    """
    if not len(refs) == len(sizes) == len(fmts) == len(hints):
        raise FormatMismatch(
            f"{len(refs)} refs, {len(sizes)} sizes, {len(fmts)} formats, {len(hints)} hints: expected as many of each"
        )
    known = {fmt for fmt in set(fmts) if 0 < len(fmt) <= _FMT_CHARS and fmt.isascii()}
    if min(sizes, default=1) >= 1 and {len(ref.key) for ref in refs} <= {STORE_KEY_BYTES} and known.issuperset(fmts):
        return
    for ref, nbytes, fmt in zip(refs, sizes, fmts, strict=True):
        if nbytes < 1 or len(ref.key) != STORE_KEY_BYTES or fmt not in known:
            raise FormatMismatch(
                f"record of {nbytes} bytes, format {fmt!r}, key of {len(ref.key)} bytes: expected at least 1 byte, "
                f"1..{_FMT_CHARS} ASCII characters and {STORE_KEY_BYTES} bytes"
            )
