"""DataClient: the verbs over a data port, and over shared memory where the service is on this machine.

It needs neither httpx nor torch. `kvtier.client.Client` adds REST's verbs, retries with pauses and a breaker.
"""

import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtier.client.decoding import layout_of
from kvtier.client.errors import ClientError, Conflict, Interrupted, NotFound, Refused, Unreachable
from kvtier.client.pipeline import Pipeline
from kvtier.client.results import Block, Found, Match, Namespace, Pin, Prefetch, PutOutcome
from kvtier.client.shared import Lease, SharedMemory
from kvtier.client.transfers import Ask, asked_of, get_blocks, get_unchecked, put_blocks
from kvtier.hints import NO_HINT, Hint
from kvtier.keys import KEY_SCHEME
from kvtier.layout import Layout
from kvtier.wire import messages as wire
from kvtier.wire.frames import Opcode
from kvtier.wire.packing import LONGEST_KEY, pack_keys, pack_tokens, unpack_keys, unpack_runs

__all__ = ["DataClient"]

_T = TypeVar("_T")
_A = TypeVar("_A", bound=msgspec.Struct)
_STAGING = 32 << 20
_LOOPBACK = re.compile(r"127\.|localhost:|\[::1\]:")


class DataClient:
    """A client of one data port. Thread-safe: calls of several threads share one connection, each answer in its turn.

    A connection that turns out to be gone is opened again once per call, before anything of its answer has come.

    Args:
        address: "host:port", or "unix:PATH" of the service's socket.
        token: the caller's; None where the service has no tokens.
        timeout: seconds that a call may take unless it says otherwise.
        context: of TLS, which the port uses where REST does; None: without.
        shared: whether blocks go through shared memory over a Unix socket; None: where the service allows it.
        staging: bytes of memory for puts through it.
        verify: compare what was read with its digest, and send digests along with puts; None: over TCP to another
            machine without TLS, the only way on which bytes are guarded by nothing better than a 16-bit sum.
    """

    def __init__(
        self,
        address: str,
        token: str | None = None,
        *,
        timeout: float = 10.0,
        context: ssl.SSLContext | None = None,
        shared: bool | None = None,
        staging: int = _STAGING,
        verify: bool | None = None,
    ) -> None:
        local = address.startswith("unix:")
        self.address = address
        self.timeout = timeout
        self._token = token or ""
        self._context = context
        self._shared = shared if shared is not None else local
        self._must_share = bool(shared)
        self._staging = staging
        self._verify = verify if verify is not None else not (local or context or _LOOPBACK.match(address))
        self._lock = threading.Lock()
        self._pipeline: Pipeline | None = None
        self._memory: SharedMemory | None = None
        self._sizes: dict[str, list[int]] = {}
        self._encoded: set[str] = set()

    # ---- the connection

    def connect(self, *, timeout: float | None = None) -> wire.Welcome:
        """Open the connection now, and say what the service is: its limits, the caller's scopes."""
        return self._connected(self._deadline(timeout))[0].welcome

    @property
    def shares_memory(self) -> bool:
        """Whether the connection that is open now shares memory."""
        return self._memory is not None

    def _connected(self, deadline: float) -> tuple[Pipeline, SharedMemory | None]:
        with self._lock:
            if self._pipeline is None or self._pipeline.broken is not None:
                if self._pipeline is not None:
                    self._pipeline.close()
                self._pipeline = self._memory = None
                self._encoded = set()
                pipeline = Pipeline(self.address, self._token, self._context, deadline)
                if self._must_share or (self._shared and pipeline.welcome.shared):
                    self._memory = self._attached(pipeline, deadline)
                self._pipeline = pipeline
            return self._pipeline, self._memory

    def _attached(self, pipeline: Pipeline, deadline: float) -> SharedMemory | None:
        staging = min(self._staging, pipeline.welcome.limits.batch_bytes)
        try:
            return SharedMemory.attach(pipeline, staging, deadline)
        except ClientError as error:
            # All memory for staging may be lent out; the socket is there.
            if isinstance(error, Refused) and not self._must_share:
                return None
            pipeline.close()
            raise

    def _deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (self.timeout if timeout is None else timeout)

    def _run(self, call: "Callable[[Pipeline, SharedMemory | None], _T]", deadline: float, *, again: bool = True) -> _T:
        """Do one call, and once more where a connection from before was found to be gone."""
        known = self._pipeline
        pipeline, memory = self._connected(deadline)
        try:
            return call(pipeline, memory)
        except Interrupted:
            if not again or pipeline is not known:
                raise
        return call(*self._connected(deadline))

    def _ask(
        self, opcode: Opcode, message: msgspec.Struct, kind: type[_A], timeout: float | None, *, again: bool = True
    ) -> _A:
        deadline = self._deadline(timeout)
        return self._run(lambda pipeline, _: pipeline.call(opcode, message, kind, deadline), deadline, again=again)

    def close(self) -> None:
        """End the connection, and with it its leases. Idempotent."""
        with self._lock:
            if self._pipeline is not None:
                self._pipeline.close()
            self._pipeline = self._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- blocks

    def put(self, ns: str, block: Block, *, timeout: float | None = None) -> PutOutcome:
        """Store one part of one block."""
        return self.put_many(ns, [block], timeout=timeout)[0]

    def put_many(self, ns: str, blocks: Sequence[Block], *, timeout: float | None = None) -> list[PutOutcome]:
        """Store blocks, parents first and the parts of one block together; one outcome each.

        Raises:
            Refused: of which the blocks before the one that it names may be stored.
        """
        deadline = self._deadline(timeout)

        def call(pipeline: Pipeline, memory: SharedMemory | None) -> list[PutOutcome]:
            if memory is not None and memory.takes(blocks):
                return memory.put(ns, blocks, deadline)
            return put_blocks(pipeline, ns, blocks, deadline, verify=self._verify)

        return self._run(call, deadline) if blocks else []

    def get(
        self, ns: str, key: bytes, part: int = 0, *, lossy: bool = False, timeout: float | None = None
    ) -> Found | None:
        """Read one part of one block; None: it is not there."""
        try:
            found = self.get_many(ns, [key], parts=[part], lossy=lossy, timeout=timeout)
        except NotFound as error:
            if error.code == "unknown_block":
                return None
            raise
        return found[0] if found else None

    def get_many(
        self,
        ns: str,
        keys: Sequence[bytes],
        *,
        parts: Sequence[int] | None = None,
        into: Sequence[memoryview] | None = None,
        each: bool = False,
        lossy: bool = False,
        depth: int = 0,
        timeout: float | None = None,
    ) -> list[Found]:
        """Read the longest leading run of blocks, or (`each`) whichever are there; block by block, part by part.

        Args:
            ns: the namespace.
            keys: of one chain, in its order.
            parts: of every block; None: all.
            into: writable buffers, one per part of each key, key by key; what is not found leaves its buffer undefined.
                None: memory is made for what is found.
            each: do not stop at the first block that is absent.
            lossy: blocks that went through a lossy format will do.
            depth: of the first key in its chain.
            timeout: seconds.

        Raises:
            FormatMismatch: the buffers do not fit.
            WrongDigest: bytes arrived damaged.
        """
        ask = Ask(ns, keys, parts, lossy, each, depth, self._deadline(timeout))

        def call(pipeline: Pipeline, memory: SharedMemory | None) -> list[Found]:
            found: list[Found] | None = None
            if ns not in self._encoded:
                try:
                    if memory is not None:
                        return memory.get(ask, into, self._block_bytes(pipeline, ask))
                    if not self._verify:
                        found = get_unchecked(pipeline, ask, into)
                except Conflict:
                    self._encoded.add(ns)
            # A damaged block is dropped by the service, which is to look at all of them now.
            return get_blocks(pipeline, ask, into, verify=self._verify) if found is None else found

        return self._run(call, ask.deadline) if keys else []

    def lease(
        self,
        ns: str,
        keys: Sequence[bytes],
        *,
        parts: Sequence[int] | None = None,
        each: bool = False,
        lossy: bool = False,
        depth: int = 0,
        timeout: float | None = None,
    ) -> Lease:
        """Hold blocks where they lie in the service's memory, and read them there: nothing is copied.

        Args: see `get_many`.

        Raises:
            Unreachable: this connection shares no memory.
            Conflict: the blocks lie encoded in host.
        """
        ask = Ask(ns, keys, parts, lossy, each, depth, self._deadline(timeout))

        def call(_: Pipeline, memory: SharedMemory | None) -> Lease:
            if memory is None:
                raise Unreachable(f"{self.address} shares no memory: connect to the service's Unix socket")
            return memory.lease(ask)

        return self._run(call, ask.deadline)

    def _block_bytes(self, pipeline: Pipeline, ask: Ask) -> int:
        """Bytes of the parts of one block; 0: they differ from block to block."""
        sizes = self._sizes.get(ask.ns)
        if sizes is None:
            asked = wire.Namespaces(ask.ns)
            answer = pipeline.call(Opcode.NAMESPACES, asked, wire.NamespacesAnswer, ask.deadline)
            sizes = self._sizes[ask.ns] = answer.namespaces[0].block_bytes
        chosen = range(len(sizes)) if ask.parts is None else ask.parts
        return sum(sizes[part] for part in chosen if part < len(sizes))

    def delete(self, ns: str, keys: Sequence[bytes], *, timeout: float | None = None) -> int:
        """Remove blocks, and what descends from them, from every tier; how many were there."""
        if not keys:
            return 0
        return self._ask(Opcode.DELETE, wire.Delete(ns, pack_keys(keys)), wire.Deleted, timeout).deleted

    # ---- looking up

    def match(
        self, ns: str, keys: Sequence[bytes], *, lossy: bool = False, depth: int = 0, timeout: float | None = None
    ) -> Match:
        """How long a leading run of a chain is there, and in which tiers. Moves nothing, renews no recency."""
        asked = wire.Match(ns, pack_keys(keys), lossy=lossy, depth=depth)
        tiers = unpack_runs(self._ask(Opcode.MATCH, asked, wire.Matched, timeout).tiers)
        return Match(tiers, tuple(keys))

    def match_tokens(
        self,
        ns: str,
        tokens: Sequence[int] | NDArray[np.integer],
        extras: Mapping[int, bytes] | None = None,
        *,
        lossy: bool = False,
        timeout: float | None = None,
    ) -> Match:
        """The same by token ids; needs a namespace with a layout and the key scheme of kvtier."""
        asked = wire.MatchTokens(ns, pack_tokens(tokens), dict(extras or {}), lossy)
        answer = self._ask(Opcode.MATCH_TOKENS, asked, wire.TokensMatched, timeout)
        return Match(unpack_runs(answer.tiers), tuple(unpack_keys(answer.keys, LONGEST_KEY)))

    # ---- what is known of blocks

    def pin(self, ns: str, keys: Sequence[bytes], ttl: float, *, timeout: float | None = None) -> Pin:
        """Keep the leading run that is in host there, for `ttl` seconds or until `unpin`."""
        answer = self._ask(Opcode.PIN, wire.Pin(ns, pack_keys(keys), ttl), wire.Pinned, timeout, again=False)
        return Pin(answer.id, answer.blocks, answer.expires)

    def unpin(self, pin_id: str, *, timeout: float | None = None) -> None:
        """End a pin."""
        self._ask(Opcode.UNPIN, wire.Unpin(pin_id), wire.Done, timeout)

    def prefetch(self, ns: str, keys: Sequence[bytes], *, depth: int = 0, timeout: float | None = None) -> Prefetch:
        """Bring the leading run into host. Returns at once; the work has the same time."""
        seconds = self.timeout if timeout is None else timeout
        asked = wire.Prefetch(ns, pack_keys(keys), timeout=seconds, depth=depth)
        return _prefetch(self._ask(Opcode.PREFETCH, asked, wire.PrefetchAnswer, timeout, again=False))

    def prefetched(self, prefetch_id: str, *, timeout: float | None = None) -> Prefetch:
        """How far a prefetch is."""
        return _prefetch(self._ask(Opcode.PREFETCHED, wire.Prefetched(prefetch_id), wire.PrefetchAnswer, timeout))

    def cancel(self, prefetch_id: str, *, timeout: float | None = None) -> Prefetch:
        """Stop a prefetch; one that has ended, or was cancelled before, is left alone."""
        try:
            return _prefetch(self._ask(Opcode.CANCEL, wire.Cancel(prefetch_id), wire.PrefetchAnswer, timeout))
        except NotFound as error:
            if error.code == "unknown_prefetch":
                return Prefetch(prefetch_id, "cancelled", 0)
            raise

    def hint(
        self,
        ns: str,
        keys: Sequence[bytes],
        hint: Hint = NO_HINT,
        *,
        first: int = 0,
        dead_from_depth: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Say what is known of consecutive blocks' future, the first of which is at depth `first`."""
        asked = wire.HintKeys(ns, pack_keys(keys), first=first, hint=asked_of(hint), dead_from_depth=dead_from_depth)
        self._ask(Opcode.HINT, asked, wire.Done, timeout)

    def end_session(self, session: str, *, timeout: float | None = None) -> None:
        """No further turn of a conversation follows."""
        self._ask(Opcode.END_SESSION, wire.EndSession(session), wire.Done, timeout)

    # ---- namespaces and the whole

    def create_namespace(
        self,
        name: str,
        layout: Layout | None = None,
        *,
        model: str = "",
        numerics: str = "",
        lora: str = "",
        scheme: str = KEY_SCHEME,
        timeout: float | None = None,
    ) -> Namespace:
        """Make a namespace; the same again is the same. `layout` None: opaque, blocks of any size.

        Raises:
            Conflict: there is another one of this name.
        """
        told = None if layout is None else json.dumps(asdict(layout))
        asked = wire.Create(name, told, model, numerics, lora, scheme)
        return _namespace(self._ask(Opcode.CREATE, asked, wire.NamespacesAnswer, timeout).namespaces[0])

    def namespace(self, name: str, *, timeout: float | None = None) -> Namespace:
        """One namespace."""
        asked = wire.Namespaces(name)
        return _namespace(self._ask(Opcode.NAMESPACES, asked, wire.NamespacesAnswer, timeout).namespaces[0])

    def namespaces(self, *, timeout: float | None = None) -> list[Namespace]:
        """Those that the caller may use."""
        answer = self._ask(Opcode.NAMESPACES, wire.Namespaces(), wire.NamespacesAnswer, timeout)
        return [_namespace(head) for head in answer.namespaces]

    def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """What the service counts, as REST's `/v1/stats`."""
        return self._ask(Opcode.STATS, wire.Stats(), wire.StatsAnswer, timeout).stats


def _prefetch(answer: wire.PrefetchAnswer) -> Prefetch:
    return Prefetch(answer.id, answer.state, answer.blocks)


def _namespace(head: wire.NamespaceHead) -> Namespace:
    return Namespace(
        head.name,
        None if head.layout is None else layout_of(json.loads(head.layout)),
        head.model,
        head.numerics,
        head.lora,
        head.scheme,
        head.created,
        head.fingerprint,
        head.parts,
        tuple(head.block_bytes),
        {
            "stored": head.stored,
            "stored_bytes": head.stored_bytes,
            "hits": head.hits,
            "misses": head.misses,
            "host_blocks": head.host_blocks,
            "host_bytes": head.host_bytes,
        },
    )
