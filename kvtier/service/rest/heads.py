"""What HTTP headers say of blocks: digests, entity tags, ranges."""

import base64
import binascii
import re
from typing import NamedTuple

from kvtier.service.cache import Found
from kvtier.service.rest.errors import RestError

__all__ = ["KEY_PATTERN", "NAME_PATTERN", "Span", "block_headers", "content_digest", "etag", "matches_tag", "span_of"]

KEY_PATTERN = r"^(?:[0-9a-f]{2}){16,32}$"
"""A chain key in hex."""
NAME_PATTERN = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$"
"""A namespace, a session. Not `.` and `..`: clients take these out of paths before they send them."""

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_SHA256 = re.compile(r"(?:^|[,\s])sha-256=:([A-Za-z0-9+/]{0,64}={0,2}):")


class Span(NamedTuple):
    """Bytes `first` to `last`, both included."""

    first: int
    last: int


def etag(digest: bytes) -> str:
    """The entity tag of bytes, from their xxh3_128."""
    return f'"xxh3-128-{digest.hex()}"'


def matches_tag(header: str, tag: str) -> bool:
    """Whether an `If-None-Match` names this tag, weakly (RFC 9110, 13.1.2)."""
    return header.strip() == "*" or tag in [one.strip().removeprefix("W/") for one in header.split(",")]


def content_digest(header: str | None) -> bytes | None:
    """The sha-256 of a `Content-Digest` (RFC 9530); None where it has none: other algorithms are not checked.

    Raises:
        RestError: it is no digest.
    """
    match = _SHA256.search(header or "")
    if match is None:
        return None
    try:
        digest = base64.b64decode(match[1], validate=True)
    except binascii.Error:
        digest = b""
    if len(digest) != 32:
        raise RestError(
            400, "invalid", "Content-Digest: expected `sha-256=:<32 bytes in base64>:`", param="Content-Digest"
        )
    return digest


def span_of(header: str | None, nbytes: int) -> Span | None:
    """What a `Range` asks for; None where it is absent, or one that may be ignored (RFC 9110, 14.2): all bytes then.

    Raises:
        RestError: 416, none of the bytes.
    """
    match = _RANGE.fullmatch(header or "")
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        span = Span(max(nbytes - int(last), 0), nbytes - 1)
    else:
        span = Span(int(first), min(int(last), nbytes - 1) if last else nbytes - 1)
    if last and first and int(first) > int(last):
        return None
    if span.first > span.last:
        raise RestError(
            416,
            "invalid_range",
            f"Range: {match[0]}: the block has {nbytes} bytes",
            param="Range",
            headers={"Content-Range": f"bytes */{nbytes}"},
        )
    return span


def block_headers(block: Found, fingerprint: bytes | None) -> dict[str, str]:
    """What a block's response says of it, in any answer but a refusal.

    Args:
        block: as it was found.
        fingerprint: of its namespace's layout, None for opaque ones.
    """
    headers = {
        "ETag": etag(block.digest),
        "KVTier-Digest": f"xxh3-128={block.digest.hex()}",
        "KVTier-Part": str(block.part),
        "KVTier-Depth": str(block.depth),
        "KVTier-Exact": "true" if block.exact else "false",
        "KVTier-Tier": block.tier,
        "KVTier-Format": "raw",
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
    }
    if block.parent is not None:
        headers["KVTier-Parent"] = block.parent.hex()
    if fingerprint is not None:
        headers["KVTier-Layout"] = fingerprint.hex()
    return headers
