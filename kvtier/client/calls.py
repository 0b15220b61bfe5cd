"""What each verb sends over REST (docs/rest.md), and how its answer is read. No sockets; both clients send these."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

import httpx

from kvtier.client.blocks import DigestReader, StreamReader, block_headers, head_of, stream_body
from kvtier.client.decoding import layout_of
from kvtier.client.exchange import Call, Inbox, read_json
from kvtier.client.results import Block, Found, Head, Match, Namespace, Pin, Prefetch, PutOutcome
from kvtier.hints import Hint
from kvtier.keys import KEY_SCHEME
from kvtier.layout import Layout
from kvtier.wire.blockstream import MEDIA_TYPE

__all__ = [
    "admin",
    "cancel",
    "clear_namespace",
    "create_namespace",
    "delete",
    "drop_namespace",
    "end_session",
    "get",
    "get_many",
    "head",
    "hint",
    "match",
    "match_tokens",
    "namespace",
    "namespaces",
    "pin",
    "prefetch",
    "prefetched",
    "put",
    "put_many",
    "stats",
    "unpin",
]

_JSON = {"Content-Type": "application/json"}
_LEAST_TIMEOUT = 0.01
"""Seconds; the service takes none that are shorter."""


def _path(*segments: str) -> str:
    return "/v1/" + "/".join(quote(segment, safe="") for segment in segments)


def _blocks(ns: str, verb: str) -> str:
    return f"{_path('namespaces', ns)}/blocks:{verb}"


def _json(content: object) -> list[memoryview | bytes | bytearray]:
    return [json.dumps(content).encode()]


def _nothing(_: object) -> None:
    return None


# ---- blocks


def put(ns: str, block: Block) -> Call[PutOutcome]:
    """One part of one block."""
    path = _path("namespaces", ns, "blocks", block.key.hex())
    headers = block_headers(block) | {"Content-Type": "application/octet-stream"}
    return Call("PUT", path, read_json(lambda told: PutOutcome(told["outcome"])), headers=headers, body=[block.data])


def get(ns: str, key: bytes, part: int, *, lossy: bool) -> Call[Found | None]:
    """One part of one block; None: it is not there."""
    path = _path("namespaces", ns, "blocks", key.hex())
    return Call(
        "GET",
        path,
        lambda headers: DigestReader(key, headers),
        params={"lossy": _flag(lossy)},
        headers={"KVTier-Part": str(part)},
        missing={"unknown_block": None},
    )


def head(ns: str, key: bytes, part: int, *, lossy: bool) -> Call[Head | None]:
    """What is known of one part of one block; None: it is not there."""
    path = _path("namespaces", ns, "blocks", key.hex())
    return Call(
        "HEAD",
        path,
        lambda headers: _HeadReader(key, headers),
        params={"lossy": _flag(lossy)},
        headers={"KVTier-Part": str(part)},
        missing={"unknown_block": None},
    )


class _HeadReader(Inbox):
    def __init__(self, key: bytes, headers: httpx.Headers) -> None:
        # The announced length is that of the bytes that GET would send.
        super().__init__(httpx.Headers())
        self._head = head_of(key, headers)

    def result(self) -> Head:  # type: ignore[override]
        return self._head


def put_many(ns: str, blocks: Sequence[Block]) -> Call[list[PutOutcome]]:
    """Blocks, parents first, as one stream."""
    return Call(
        "POST",
        _blocks(ns, "put"),
        read_json(lambda told: [PutOutcome(outcome) for outcome in told["outcomes"]]),
        headers={"Content-Type": MEDIA_TYPE},
        body=stream_body(blocks),
    )


def get_many(
    ns: str,
    keys: Sequence[bytes],
    parts: Sequence[int] | None,
    timeout: float,
    *,
    each: bool,
    lossy: bool,
    depth: int = 0,
) -> Call[list[Found]]:
    """The leading run of blocks, or (`each`) whichever are there."""
    asked = {
        "keys": _hex(keys),
        "depth": depth,
        "parts": None if parts is None else list(parts),
        "each": each,
        "lossy": lossy,
        "timeout": max(timeout, _LEAST_TIMEOUT),
    }
    return Call("POST", _blocks(ns, "get"), lambda _: StreamReader(), headers=_JSON, body=_json(asked))


def delete(ns: str, keys: Sequence[bytes]) -> Call[int]:
    """Blocks, and what descends from them."""
    return Call(
        "POST",
        _blocks(ns, "delete"),
        read_json(lambda told: int(told["deleted"])),
        headers=_JSON,
        body=_json({"keys": _hex(keys)}),
    )


def match(ns: str, keys: Sequence[bytes], *, lossy: bool, depth: int = 0) -> Call[Match]:
    """The leading run, by chain keys."""
    return Call(
        "POST",
        "/v1/match",
        read_json(lambda told: Match(tuple(told["tiers"]), tuple(keys))),
        headers=_JSON,
        body=_json({"namespace": ns, "keys": _hex(keys), "lossy": lossy, "depth": depth}),
    )


def match_tokens(ns: str, tokens: Sequence[int], extras: Mapping[int, bytes] | None, *, lossy: bool) -> Call[Match]:
    """The leading run, by token ids."""
    asked = {
        "namespace": ns,
        "tokens": [int(token) for token in tokens],
        "extras": {str(at): extra.hex() for at, extra in (extras or {}).items()},
        "lossy": lossy,
    }
    return Call(
        "POST",
        "/v1/match",
        read_json(lambda told: Match(tuple(told["tiers"]), tuple(bytes.fromhex(key) for key in told["keys"]))),
        headers=_JSON,
        body=_json(asked),
    )


# ---- what is known of blocks


def pin(ns: str, keys: Sequence[bytes], ttl: float) -> Call[Pin]:
    """Every call is another pin, so this is never repeated."""
    return Call(
        "POST",
        f"{_path('namespaces', ns)}/pins",
        read_json(lambda told: Pin(told["id"], int(told["blocks"]), float(told["expires"]))),
        headers=_JSON,
        body=_json({"keys": _hex(keys), "ttl": ttl}),
        idempotent=False,
    )


def unpin(pin_id: str) -> Call[None]:
    """One that has expired is no error: that is what was wanted."""
    return Call("DELETE", _path("pins", pin_id), read_json(_nothing), missing={"unknown_pin": None})


def prefetch(ns: str, keys: Sequence[bytes], timeout: float, *, depth: int = 0) -> Call[Prefetch]:
    """Every call is another prefetch, so this is never repeated."""
    return Call(
        "POST",
        f"{_path('namespaces', ns)}/prefetches",
        read_json(_prefetch),
        headers=_JSON,
        body=_json({"keys": _hex(keys), "depth": depth, "timeout": max(timeout, _LEAST_TIMEOUT)}),
        idempotent=False,
    )


def prefetched(prefetch_id: str) -> Call[Prefetch]:
    """How far it is."""
    return Call("GET", _path("prefetches", prefetch_id), read_json(_prefetch))


def cancel(prefetch_id: str) -> Call[None]:
    """One that has ended is no error."""
    return Call("DELETE", _path("prefetches", prefetch_id), read_json(_nothing), missing={"unknown_prefetch": None})


def _prefetch(told: Any) -> Prefetch:
    return Prefetch(told["id"], told["state"], int(told["blocks"]))


def hint(ns: str, keys: Sequence[bytes], known: Hint, first: int, dead_from_depth: int | None) -> Call[None]:
    """One hint for consecutive blocks, the first at depth `first`; dead from a depth on."""
    asked = {"keys": _hex(keys), "first": first, "dead_from_depth": dead_from_depth, **asdict(known)}
    return Call("POST", _blocks(ns, "hint"), read_json(_nothing), headers=_JSON, body=_json(asked))


def end_session(session: str) -> Call[None]:
    """No further turn follows."""
    return Call("POST", f"{_path('sessions', session)}:end", read_json(_nothing))


# ---- namespaces and the whole


def create_namespace(
    name: str, layout: Layout | None, model: str = "", numerics: str = "", lora: str = "", scheme: str = KEY_SCHEME
) -> Call[Namespace]:
    """The same again is the same."""
    asked = {
        "name": name,
        "layout": None if layout is None else asdict(layout),
        "model": model,
        "numerics": numerics,
        "lora": lora,
        "scheme": scheme,
    }
    return Call("POST", "/v1/namespaces", read_json(_namespace), headers=_JSON, body=_json(asked))


def namespace(name: str) -> Call[Namespace]:
    """One of them."""
    return Call("GET", _path("namespaces", name), read_json(_namespace))


def namespaces() -> Call[list[Namespace]]:
    """Those that the token may use."""
    return Call("GET", "/v1/namespaces", read_json(lambda told: [_namespace(one) for one in told["namespaces"]]))


def clear_namespace(name: str) -> Call[None]:
    """All of its blocks."""
    return Call("POST", f"{_path('namespaces', name)}:clear", read_json(_nothing))


def drop_namespace(name: str) -> Call[None]:
    """One that is gone is no error."""
    return Call("DELETE", _path("namespaces", name), read_json(_nothing), missing={"unknown_namespace": None})


_FIELDS = {"name", "layout", "model", "numerics", "lora", "scheme", "created", "fingerprint", "parts", "block_bytes"}


def _namespace(told: Any) -> Namespace:
    layout = told["layout"]
    return Namespace(
        name=told["name"],
        layout=None if layout is None else layout_of(layout),
        model=told["model"],
        numerics=told["numerics"],
        lora=told["lora"],
        scheme=told["scheme"],
        created=float(told["created"]),
        fingerprint=bytes.fromhex(told["fingerprint"] or ""),
        parts=int(told["parts"]),
        block_bytes=tuple(told["block_bytes"]),
        counts={name: value for name, value in told.items() if name not in _FIELDS},
    )


def stats(what: str = "stats") -> Call[dict[str, Any]]:
    """All figures; or, with `tenants`, the quotas."""
    return Call("GET", _path(what), read_json(dict))


def admin(verb: str, asked: Mapping[str, object] | None = None) -> Call[dict[str, Any]]:
    """A verb of the scope `admin`; those that take long are not repeated by themselves."""
    return Call(
        "POST",
        _path("admin", verb),
        read_json(lambda told: told or {}),
        headers=_JSON if asked else {},
        body=_json(asked) if asked else (),
        idempotent=verb not in ("flush", "compact"),
    )


def _hex(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def _flag(value: bool) -> str:  # noqa: FBT001
    return "true" if value else "false"
