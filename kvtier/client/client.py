"""Client: the verbs of the cache service, for threads.

from kvtier.client import Block, Client

with Client("http://127.0.0.1:7700", token=secret) as client:
    client.create_namespace("notes")
    client.put("notes", Block(key, data))
    found = client.get("notes", key)
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from kvtier.client import calls
from kvtier.client.data import DataClient
from kvtier.client.errors import ClientError, Unreachable
from kvtier.client.exchange import Call
from kvtier.client.following import Following
from kvtier.client.http import HttpCaller, session
from kvtier.client.options import ClientOptions
from kvtier.client.results import Block, Event, Found, Gap, Head, Match, Namespace, Pin, Prefetch, PutOutcome
from kvtier.client.retrying import Attempts
from kvtier.client.ways import Ways, offered
from kvtier.hints import NO_HINT, Hint
from kvtier.keys import KEY_SCHEME
from kvtier.layout import Layout

__all__ = ["Client"]

_T = TypeVar("_T")


class Client:
    """A client of one service. Thread-safe; connections are kept and used again.

    Keys are chain keys, 16 to 32 bytes. `timeout` is in seconds, for the call with its retries; None: as the options
    say. Every verb raises an error of `kvtier.client.errors`, and nothing else, for what goes wrong on its way; a block
    that is not there is no error. Idempotent verbs are tried again after losses and back-pressure, puts among them:
    what a chain key names is always the same bytes.

    Args:
        url: of the REST port, `http://` or `https://`.
        token: see `kvtier cache token`; None for a service without tokens.
        options: deadlines, retries, how bytes travel.
        transport: instead of the network.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:7700",
        *,
        token: str | None = None,
        options: ClientOptions | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.options = options or ClientOptions()
        chosen = session(url, token, self.options)
        self._caller = HttpCaller(chosen, transport)
        self._ways = Ways(chosen)

    @property
    def way(self) -> str:
        """How block bytes travel now: shared memory, unix, data or rest; rest until the first of them did."""
        return self._ways.name

    def _move(self, verb: Callable[[DataClient, float], _T], call: Call[_T], timeout: float | None) -> _T:
        """Do a verb on the fastest way that can be had, which at worst is REST."""
        attempts = Attempts(self.options, timeout, idempotent=call.idempotent)
        while True:
            try:
                if self._ways.due:
                    self._ways.choose(self._caller.run(offered(), attempts.remaining()), attempts.remaining())
                return self._ways.move(verb, attempts)
            except Unreachable:
                return self._caller.run(call, attempts.remaining())
            except ClientError as error:
                time.sleep(attempts.pause(error))

    # ---- blocks

    def put(self, ns: str, block: Block, *, timeout: float | None = None) -> PutOutcome:
        """Store one part of one block.

        Raises:
            QuotaExceeded: there is no room, and nothing of the tenant's may be evicted.
        """
        return self._move(lambda data, left: data.put(ns, block, timeout=left), calls.put(ns, block), timeout)

    def put_many(self, ns: str, blocks: Sequence[Block], *, timeout: float | None = None) -> list[PutOutcome]:
        """Store blocks, parents first; one outcome each."""
        if not blocks:
            return []
        call = calls.put_many(ns, blocks)
        return self._move(lambda data, left: data.put_many(ns, blocks, timeout=left), call, timeout)

    def get(
        self, ns: str, key: bytes, part: int = 0, *, lossy: bool = False, timeout: float | None = None
    ) -> Found | None:
        """Read one part of one block; None: it is not there.

        Args:
            ns: the namespace.
            key: the block's.
            part: `group * shards + shard`.
            lossy: blocks that went through a lossy format will do.
            timeout: seconds.

        Raises:
            WrongDigest: its bytes arrived damaged, twice.
        """
        call = calls.get(ns, key, part, lossy=lossy)
        return self._move(lambda data, left: data.get(ns, key, part, lossy=lossy, timeout=left), call, timeout)

    def get_many(
        self,
        ns: str,
        keys: Sequence[bytes],
        *,
        parts: Sequence[int] | None = None,
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
            each: do not stop at the first block that is absent.
            lossy: see `get`.
            depth: of the first key in its chain; by a wrong one, tiers that keep runs of blocks find less.
            timeout: seconds.
        """
        seconds = self.options.timeout if timeout is None else timeout
        call = calls.get_many(ns, keys, parts, seconds, each=each, lossy=lossy, depth=depth)
        if not keys:
            return []
        return self._move(
            lambda data, left: data.get_many(ns, keys, parts=parts, each=each, lossy=lossy, depth=depth, timeout=left),
            call,
            seconds,
        )

    def head(
        self, ns: str, key: bytes, part: int = 0, *, lossy: bool = False, timeout: float | None = None
    ) -> Head | None:
        """What is known of one part of one block; None: it is not there."""
        return self._caller.run(calls.head(ns, key, part, lossy=lossy), timeout)

    def delete(self, ns: str, keys: Sequence[bytes], *, timeout: float | None = None) -> int:
        """Remove blocks, and what descends from them, from every tier; how many were there."""
        return self._caller.run(calls.delete(ns, keys), timeout) if keys else 0

    # ---- looking up

    def match(
        self, ns: str, keys: Sequence[bytes], *, lossy: bool = False, depth: int = 0, timeout: float | None = None
    ) -> Match:
        """How long a leading run of a chain is there, and in which tiers. Moves nothing, renews no recency.

        depth: see `get_many`.
        """
        if not keys:
            return Match((), ())
        call = calls.match(ns, keys, lossy=lossy, depth=depth)
        return self._move(
            lambda data, left: data.match(ns, keys, lossy=lossy, depth=depth, timeout=left), call, timeout
        )

    def match_tokens(
        self,
        ns: str,
        tokens: Sequence[int],
        extras: Mapping[int, bytes] | None = None,
        *,
        lossy: bool = False,
        timeout: float | None = None,
    ) -> Match:
        """The same by token ids; needs a namespace with a layout and the key scheme of kvtier.

        Args:
            ns: the namespace.
            tokens: of the prompt.
            extras: block index -> `keys.encode_extra(...)` of what the block holds besides tokens.
            lossy: see `get`.
            timeout: seconds.
        """
        call = calls.match_tokens(ns, tokens, extras, lossy=lossy)
        return self._move(
            lambda data, left: data.match_tokens(ns, tokens, extras, lossy=lossy, timeout=left), call, timeout
        )

    # ---- what is known of blocks

    def pin(self, ns: str, keys: Sequence[bytes], ttl: float, *, timeout: float | None = None) -> Pin:
        """Keep the leading run that is in host there, for `ttl` seconds or until `unpin`."""
        return self._caller.run(calls.pin(ns, keys, ttl), timeout)

    def unpin(self, pin_id: str, *, timeout: float | None = None) -> None:
        """End a pin; one that has expired is none any more."""
        self._caller.run(calls.unpin(pin_id), timeout)

    def prefetch(self, ns: str, keys: Sequence[bytes], *, depth: int = 0, timeout: float | None = None) -> Prefetch:
        """Bring the leading run into host. Returns at once; the work has the same time.

        depth: see `get_many`.
        """
        seconds = self.options.timeout if timeout is None else timeout
        return self._caller.run(calls.prefetch(ns, keys, seconds, depth=depth), seconds)

    def prefetched(self, prefetch_id: str, *, timeout: float | None = None) -> Prefetch:
        """How far a prefetch is."""
        return self._caller.run(calls.prefetched(prefetch_id), timeout)

    def cancel(self, prefetch_id: str, *, timeout: float | None = None) -> None:
        """Stop a prefetch; one that has ended is left alone."""
        self._caller.run(calls.cancel(prefetch_id), timeout)

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
        """Say what is known of consecutive blocks' future; absent ones are ignored.

        Args:
            ns: the namespace.
            keys: of the blocks.
            hint: of all of them.
            first: depth of the first key.
            dead_from_depth: from this depth on they will not be used again.
            timeout: seconds.
        """
        self._caller.run(calls.hint(ns, keys, hint, first, dead_from_depth), timeout)

    def end_session(self, session: str, *, timeout: float | None = None) -> None:
        """No further turn of a conversation follows."""
        self._caller.run(calls.end_session(session), timeout)

    # ---- namespaces

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
        """Make a namespace; the same again is the same.

        Args:
            name: 1 to 128 of `A-Z a-z 0-9 . _ -`, no dot first.
            layout: of its blocks; None: opaque, blocks of any size.
            model: fingerprint of weights and revision.
            numerics: what changes values without changing shapes.
            lora: adapter, "" for none.
            scheme: how its chain keys are made.
            timeout: seconds.

        Raises:
            Conflict: there is another one of this name.
        """
        return self._caller.run(calls.create_namespace(name, layout, model, numerics, lora, scheme), timeout)

    def namespace(self, name: str, *, timeout: float | None = None) -> Namespace:
        """One namespace, with its figures."""
        return self._caller.run(calls.namespace(name), timeout)

    def namespaces(self, *, timeout: float | None = None) -> list[Namespace]:
        """Those that the token may use."""
        return self._caller.run(calls.namespaces(), timeout)

    def clear_namespace(self, name: str, *, timeout: float | None = None) -> None:
        """Remove all blocks of a namespace."""
        self._caller.run(calls.clear_namespace(name), timeout)

    def drop_namespace(self, name: str, *, timeout: float | None = None) -> None:
        """Remove a namespace with all of its blocks."""
        self._caller.run(calls.drop_namespace(name), timeout)

    # ---- the whole

    def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """All figures that the token may see; `docs/rest.md` names them."""
        return self._caller.run(calls.stats(), timeout)

    def tenants(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Quotas, and what is used of them: the token's tenant, or with the scope admin all."""
        tenants: list[dict[str, Any]] = self._caller.run(calls.stats("tenants"), timeout)["tenants"]
        return tenants

    def events(
        self, since: str | None = None, *, silence: float = 60.0, patience: float = math.inf
    ) -> Iterator[Event | Gap]:
        """Follow what becomes of blocks, for ever. A connection that breaks is made again where it broke.

        Args:
            since: `id` of the last event that is known; None: from now on.
            silence: seconds after which a service that says nothing, not even that it is alive, is taken for gone.
            patience: seconds that it may be gone.

        Raises:
            Refused: the token may not.
            ClientError: it was gone for longer than `patience`.
        """
        return Following(self.options, since, patience).events(self._caller, silence)

    # ---- scope admin

    def drain(self, *, timeout: float | None = None) -> None:
        """Refuse new calls; what runs may end."""
        self._caller.run(calls.admin("drain"), timeout)

    def resume(self, *, timeout: float | None = None) -> None:
        """Take calls again."""
        self._caller.run(calls.admin("resume"), timeout)

    def flush(self, *, timeout: float | None = None) -> None:
        """Make everything that was put as durable as the tiers can."""
        self._caller.run(calls.admin("flush"), timeout)

    def compact(self, *, timeout: float | None = None) -> dict[str, dict[str, int]]:
        """Put the NVMe directories in order; what was done, by tenant."""
        done: dict[str, dict[str, int]] = self._caller.run(calls.admin("compact"), timeout)["tenants"]
        return done

    def set_capacity(self, tenant: str, tier: str, nbytes: int, *, timeout: float | None = None) -> int:
        """Change a quota; returns what is in force."""
        asked = {"tenant": tenant, "tier": tier, "bytes": nbytes}
        return int(self._caller.run(calls.admin("capacity", asked), timeout)["bytes"])

    def set_policy(self, tenant: str, policy: str, *, timeout: float | None = None) -> None:
        """Change which block of a tenant leaves host first."""
        self._caller.run(calls.admin("policy", {"tenant": tenant, "policy": policy}), timeout)

    def close(self) -> None:
        """End its connections. Idempotent."""
        self._caller.close()
        self._ways.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
