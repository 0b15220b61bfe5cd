"""The head of each message: one msgpack map, its keys the field names below.

A request's unknown field is an error: what is misspelt must not silently be a default. An answer's is ignored, so that
a later service can say more. An item is one part of one block; columns have one entry per item. `keys` are packed end
to end, `width` bytes each, of which the first 16 count.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from kvtier.hints import PRIORITY_SECONDS, Reuse
from kvtier.keys import KEY_SCHEME, STORE_KEY_BYTES
from kvtier.wire.frames import Opcode, WireError
from kvtier.wire.packing import Runs

__all__ = [
    "ANSWERS",
    "REQUESTS",
    "Asked",
    "Cancel",
    "Create",
    "Delete",
    "Deleted",
    "Done",
    "EndSession",
    "Error",
    "Get",
    "Got",
    "Hello",
    "HintKeys",
    "Lease",
    "Leased",
    "Limits",
    "List",
    "Listed",
    "Match",
    "MatchTokens",
    "Matched",
    "NamespaceHead",
    "Namespaces",
    "NamespacesAnswer",
    "Outcomes",
    "Pin",
    "Pinned",
    "Prefetch",
    "PrefetchAnswer",
    "Prefetched",
    "Put",
    "Release",
    "Share",
    "Shared",
    "SharedRegion",
    "Stage",
    "Stats",
    "StatsAnswer",
    "TokensMatched",
    "Unpin",
    "Welcome",
    "decode",
    "encode",
]


class _Request(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    pass


class _Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    pass


# ---- the connection


class Hello(_Request, frozen=True):
    """The first message. `token`: "" for none. `versions`: of the protocol that the client speaks."""

    versions: list[int]
    token: str = ""
    client: str = ""


class Limits(_Answer, frozen=True):
    """Of one request, in bytes but for `keys`. `idle`: seconds after which a silent connection is ended."""

    block_bytes: int
    batch_bytes: int
    keys: int
    idle: float


class Welcome(_Answer, frozen=True):
    """The caller is known. `shared`: whether `Share` may be asked for."""

    version: int
    service: str
    tenant: str
    scopes: list[str]
    limits: Limits
    shared: bool = False


class Error(_Answer, frozen=True):
    """The head of every answer with the ERROR flag. `retry_after`: seconds."""

    status: int
    code: str
    message: str
    retry_after: float | None = None


class Done(_Answer, frozen=True):
    """It is done, and there is nothing to say about it."""


# ---- looking up


class Match(_Request, frozen=True):
    """How long a leading run of these chain keys is there, and in which tiers. `depth`: of the first."""

    ns: str
    keys: bytes
    width: int = STORE_KEY_BYTES
    lossy: bool = False
    depth: int = 0


class Matched(_Answer, frozen=True):
    """`tiers`: of each block of the run, as [name, count] pairs."""

    tiers: Runs


class MatchTokens(_Request, frozen=True):
    """The same by token ids, uint32le. `extras`: block index -> what the block holds besides tokens."""

    ns: str
    tokens: bytes
    extras: dict[int, bytes] = {}
    lossy: bool = False


class TokensMatched(_Answer, frozen=True):
    """`keys`: of every full block, of 32 bytes each."""

    keys: bytes
    tiers: Runs


# ---- reading


class _Read(_Request, frozen=True, kw_only=True):
    ns: str
    keys: bytes
    width: int = STORE_KEY_BYTES
    parts: list[int] | None = None
    lossy: bool = False
    each: bool = False
    depth: int = 0
    timeout: float | None = None
    unchecked: bool = False


class _Items(_Answer, frozen=True, kw_only=True):
    at: list[int] = []
    parts: list[int] = []
    sizes: list[int] = []
    exact: list[bool] = []
    depths: list[int] = []
    parents: bytes = b""
    tiers: Runs = []
    heads: bytes = b""
    checksums: bytes = b""


class Get(_Read, frozen=True, kw_only=True):
    """Blocks: the leading run that is there, or (`each`) whichever parts of them are.

    parts: None for every part of the layout. timeout: seconds. unchecked: the service does not look at the bytes: the
    client does, with what guards each item. digests: wanted. limit: bytes of each item that are wanted, from its first;
    `Got.sizes` are those of the whole items all the same.
    """

    digests: bool = False
    limit: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Got(_Items, frozen=True, kw_only=True):
    """Columns of the items whose bytes are the body, in its order.

    at: which of the request's keys. parents: 16 bytes each, zeros where there is none; empty where none has one.
    heads, checksums: where they are unchecked, 64 and 16 bytes for each item, whose bytes are sound if
    xxh3_128(head + bytes) is the checksum. digests: xxh3_128 of each item's bytes, 16 bytes each, if they were wanted.
    """

    digests: bytes = b""


class Lease(_Read, frozen=True, kw_only=True):
    """As `Get`, but the bytes stay where they are, in the shared regions, until `Release`."""


class Leased(_Items, frozen=True, kw_only=True):
    """As `Got`, and where each item lies. `lease`: what to release; 0 where nothing was found."""

    lease: int = 0
    regions: list[int] = []
    offsets: list[int] = []


class Release(_Request, frozen=True):
    """End leases."""

    leases: list[int]


# ---- writing


class Asked(_Request, frozen=True):
    """A `kvtier.hints.Hint`."""

    priority: float = 1.0
    priority_ttl: float = PRIORITY_SECONDS
    ttl: float | None = None
    reuse: Reuse = "unknown"
    session: str | None = None


class _Write(_Request, frozen=True, kw_only=True):
    ns: str
    keys: bytes
    sizes: list[int]
    width: int = STORE_KEY_BYTES
    parts: list[int] = []
    depths: list[int] = []
    parents: bytes = b""
    exact: list[bool] = []
    digests: bytes = b""
    hint: Asked | None = None
    timeout: float | None = None


class Put(_Write, frozen=True, kw_only=True):
    """Blocks, parents first; the body is their bytes. Columns have one entry per item; all but `sizes` may be empty.

    keys: of each item. parts: empty for part 0. depths: empty for -1, unknown. parents: one key each; that of an item
    of depth 0 or -1 counts for nothing. exact: empty for all exact. digests: as in `Got`. hint: of all.
    """


class Stage(_Write, frozen=True, kw_only=True):
    """As `Put`, with the bytes in the connection's staging region, at `offsets`, and no body."""

    offsets: list[int]


class Outcomes(_Answer, frozen=True):
    """Per item, as [name, count] pairs: stored, exists, dropped."""

    outcomes: Runs


class Delete(_Request, frozen=True):
    """Remove blocks and what descends from them."""

    ns: str
    keys: bytes
    width: int = STORE_KEY_BYTES


class Deleted(_Answer, frozen=True):
    """How many of the keys were there."""

    deleted: int


class List(_Request, frozen=True):
    """All blocks of a namespace, answer by answer. Those that come and go meanwhile may be missing, or come twice."""

    ns: str


class Listed(_Answer, frozen=True):
    """The first 16 bytes of the chain keys of some blocks whose part 0 is in any tier."""

    keys: bytes = b""


# ---- what is known of blocks


class Pin(_Request, frozen=True):
    """Keep the leading run in host for `ttl` seconds."""

    ns: str
    keys: bytes
    ttl: float
    width: int = STORE_KEY_BYTES


class Pinned(_Answer, frozen=True):
    """`blocks`: how many were there to be pinned. `expires`: seconds since the epoch."""

    id: str
    blocks: int
    expires: float


class Unpin(_Request, frozen=True):
    """End a pin."""

    id: str


class Prefetch(_Request, frozen=True):
    """Bring the leading run into host. `depth`: of the first key."""

    ns: str
    keys: bytes
    width: int = STORE_KEY_BYTES
    timeout: float | None = None
    depth: int = 0


class Prefetched(_Request, frozen=True):
    """How far a prefetch is."""

    id: str


class PrefetchAnswer(_Answer, frozen=True):
    """`blocks`: leading blocks in host. `state`: as `docs/data-port.md` lists them."""

    id: str
    state: str
    blocks: int = 0


class Cancel(_Request, frozen=True):
    """End a prefetch."""

    id: str


class HintKeys(_Request, frozen=True):
    """Say what is known of consecutive blocks, the first of which is at depth `first`.

    reuse: of each, unknown beyond its end; empty: `hint.reuse` for all. dead_from_depth: blocks from this depth on will
    not be used again.
    """

    ns: str
    keys: bytes
    width: int = STORE_KEY_BYTES
    first: int = 0
    hint: Asked = Asked()
    reuse: list[Reuse] = []
    dead_from_depth: int | None = None


class EndSession(_Request, frozen=True):
    """No further turn of this conversation follows."""

    session: str


# ---- namespaces


class NamespaceHead(_Answer, frozen=True):
    """A namespace. `layout`: as JSON text (`docs/data-port.md`), None for opaque blocks."""

    name: str
    layout: str | None
    model: str
    numerics: str
    lora: str
    scheme: str
    fingerprint: bytes
    parts: int
    block_bytes: list[int]
    created: float
    stored: int = 0
    stored_bytes: int = 0
    hits: int = 0
    misses: int = 0
    host_blocks: int = 0
    host_bytes: int = 0


class Namespaces(_Request, frozen=True):
    """All namespaces of the caller, or the one of this name."""

    name: str | None = None


class NamespacesAnswer(_Answer, frozen=True):
    """By name."""

    namespaces: list[NamespaceHead]


class Create(_Request, frozen=True):
    """Make a namespace, or find it as it is."""

    name: str
    layout: str | None = None
    model: str = ""
    numerics: str = ""
    lora: str = ""
    scheme: str = KEY_SCHEME


class Stats(_Request, frozen=True):
    """Counters and gauges."""


class StatsAnswer(_Answer, frozen=True):
    """As REST's `/v1/stats`."""

    stats: dict[str, Any]


# ---- shared memory


class Share(_Request, frozen=True):
    """Map the tenant's host memory, and a staging region of so many bytes (0: none)."""

    staging: int = 0


class SharedRegion(_Answer, frozen=True):
    """A region, whose descriptor follows the answer."""

    id: int
    bytes: int
    writable: bool


class Shared(_Answer, frozen=True):
    """`staging`: id of the staging region; None: none was asked for."""

    regions: list[SharedRegion]
    staging: int | None = None


REQUESTS: Mapping[Opcode, type[msgspec.Struct]] = {
    Opcode.HELLO: Hello,
    Opcode.MATCH: Match,
    Opcode.MATCH_TOKENS: MatchTokens,
    Opcode.GET: Get,
    Opcode.PUT: Put,
    Opcode.DELETE: Delete,
    Opcode.PIN: Pin,
    Opcode.UNPIN: Unpin,
    Opcode.PREFETCH: Prefetch,
    Opcode.PREFETCHED: Prefetched,
    Opcode.CANCEL: Cancel,
    Opcode.HINT: HintKeys,
    Opcode.END_SESSION: EndSession,
    Opcode.NAMESPACES: Namespaces,
    Opcode.CREATE: Create,
    Opcode.STATS: Stats,
    Opcode.SHARE: Share,
    Opcode.LEASE: Lease,
    Opcode.RELEASE: Release,
    Opcode.STAGE: Stage,
    Opcode.LIST: List,
}
ANSWERS: Mapping[Opcode, type[msgspec.Struct]] = {
    Opcode.HELLO: Welcome,
    Opcode.MATCH: Matched,
    Opcode.MATCH_TOKENS: TokensMatched,
    Opcode.GET: Got,
    Opcode.PUT: Outcomes,
    Opcode.DELETE: Deleted,
    Opcode.PIN: Pinned,
    Opcode.UNPIN: Done,
    Opcode.PREFETCH: PrefetchAnswer,
    Opcode.PREFETCHED: PrefetchAnswer,
    Opcode.CANCEL: PrefetchAnswer,
    Opcode.HINT: Done,
    Opcode.END_SESSION: Done,
    Opcode.NAMESPACES: NamespacesAnswer,
    Opcode.CREATE: NamespacesAnswer,
    Opcode.STATS: StatsAnswer,
    Opcode.SHARE: Shared,
    Opcode.LEASE: Leased,
    Opcode.RELEASE: Done,
    Opcode.STAGE: Outcomes,
    Opcode.LIST: Listed,
}

_T = TypeVar("_T", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder()
_kinds: set[type[msgspec.Struct]] = {*REQUESTS.values(), *ANSWERS.values(), Error}
_decoders: Mapping[type[msgspec.Struct], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in _kinds
}


def encode(message: msgspec.Struct) -> bytes:
    """A head's bytes."""
    return _encoder.encode(message)


def decode(kind: type[_T], head: bytes | bytearray | memoryview) -> _T:
    """A head of this kind.

    Raises:
        WireError: it is none.
    """
    try:
        decoded: _T = _decoders[kind].decode(head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a head of {len(head)} bytes is no {kind.__name__}: {error}") from error
    return decoded
