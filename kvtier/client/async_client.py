"""AsyncClient: the verbs of the cache service, for asyncio. They are those of `Client`, where they are described."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from kvtier.client import calls
from kvtier.client.async_http import AsyncHttpCaller
from kvtier.client.data import DataClient
from kvtier.client.errors import ClientError, Unreachable
from kvtier.client.exchange import Call
from kvtier.client.following import Following
from kvtier.client.http import session
from kvtier.client.options import ClientOptions
from kvtier.client.results import Block, Event, Found, Gap, Head, Match, Namespace, Pin, Prefetch, PutOutcome
from kvtier.client.retrying import Attempts
from kvtier.client.ways import Ways, offered
from kvtier.hints import NO_HINT, Hint
from kvtier.keys import KEY_SCHEME
from kvtier.layout import Layout

__all__ = ["AsyncClient"]

_T = TypeVar("_T")


class AsyncClient:
    """A client of one service, for one event loop. Cancelling a call ends its request.

    Takes what `Client` takes.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:7700",
        *,
        token: str | None = None,
        options: ClientOptions | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.options = options or ClientOptions()
        chosen = session(url, token, self.options)
        self._caller = AsyncHttpCaller(chosen, transport)
        self._ways = Ways(chosen)

    @property
    def way(self) -> str:
        """See `Client.way`."""
        return self._ways.name

    async def _move(self, verb: Callable[[DataClient, float], _T], call: Call[_T], timeout: float | None) -> _T:
        """See `Client`. What a thread has begun runs to its end, also where nobody waits for it any more."""
        attempts = Attempts(self.options, timeout, idempotent=call.idempotent)
        while True:
            try:
                if self._ways.due:
                    offer = await self._caller.run(offered(), attempts.remaining())
                    await asyncio.to_thread(self._ways.choose, offer, attempts.remaining())
                return await asyncio.to_thread(self._ways.move, verb, attempts)
            except Unreachable:
                return await self._caller.run(call, attempts.remaining())
            except ClientError as error:
                await asyncio.sleep(attempts.pause(error))

    # ---- blocks

    async def put(self, ns: str, block: Block, *, timeout: float | None = None) -> PutOutcome:
        """See `Client.put`."""
        return await self._move(lambda data, left: data.put(ns, block, timeout=left), calls.put(ns, block), timeout)

    async def put_many(self, ns: str, blocks: Sequence[Block], *, timeout: float | None = None) -> list[PutOutcome]:
        """See `Client.put_many`."""
        if not blocks:
            return []
        call = calls.put_many(ns, blocks)
        return await self._move(lambda data, left: data.put_many(ns, blocks, timeout=left), call, timeout)

    async def get(
        self, ns: str, key: bytes, part: int = 0, *, lossy: bool = False, timeout: float | None = None
    ) -> Found | None:
        """See `Client.get`."""
        call = calls.get(ns, key, part, lossy=lossy)
        return await self._move(lambda data, left: data.get(ns, key, part, lossy=lossy, timeout=left), call, timeout)

    async def get_many(
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
        """See `Client.get_many`."""
        seconds = self.options.timeout if timeout is None else timeout
        call = calls.get_many(ns, keys, parts, seconds, each=each, lossy=lossy, depth=depth)
        if not keys:
            return []
        return await self._move(
            lambda data, left: data.get_many(ns, keys, parts=parts, each=each, lossy=lossy, depth=depth, timeout=left),
            call,
            seconds,
        )

    async def head(
        self, ns: str, key: bytes, part: int = 0, *, lossy: bool = False, timeout: float | None = None
    ) -> Head | None:
        """See `Client.head`."""
        return await self._caller.run(calls.head(ns, key, part, lossy=lossy), timeout)

    async def delete(self, ns: str, keys: Sequence[bytes], *, timeout: float | None = None) -> int:
        """See `Client.delete`."""
        return await self._caller.run(calls.delete(ns, keys), timeout) if keys else 0

    # ---- looking up

    async def match(
        self, ns: str, keys: Sequence[bytes], *, lossy: bool = False, depth: int = 0, timeout: float | None = None
    ) -> Match:
        """See `Client.match`."""
        if not keys:
            return Match((), ())
        call = calls.match(ns, keys, lossy=lossy, depth=depth)
        return await self._move(
            lambda data, left: data.match(ns, keys, lossy=lossy, depth=depth, timeout=left), call, timeout
        )

    async def match_tokens(
        self,
        ns: str,
        tokens: Sequence[int],
        extras: Mapping[int, bytes] | None = None,
        *,
        lossy: bool = False,
        timeout: float | None = None,
    ) -> Match:
        """See `Client.match_tokens`."""
        call = calls.match_tokens(ns, tokens, extras, lossy=lossy)
        return await self._move(
            lambda data, left: data.match_tokens(ns, tokens, extras, lossy=lossy, timeout=left), call, timeout
        )

    # ---- what is known of blocks

    async def pin(self, ns: str, keys: Sequence[bytes], ttl: float, *, timeout: float | None = None) -> Pin:
        """See `Client.pin`."""
        return await self._caller.run(calls.pin(ns, keys, ttl), timeout)

    async def unpin(self, pin_id: str, *, timeout: float | None = None) -> None:
        """See `Client.unpin`."""
        await self._caller.run(calls.unpin(pin_id), timeout)

    async def prefetch(
        self, ns: str, keys: Sequence[bytes], *, depth: int = 0, timeout: float | None = None
    ) -> Prefetch:
        """See `Client.prefetch`."""
        seconds = self.options.timeout if timeout is None else timeout
        return await self._caller.run(calls.prefetch(ns, keys, seconds, depth=depth), seconds)

    async def prefetched(self, prefetch_id: str, *, timeout: float | None = None) -> Prefetch:
        """See `Client.prefetched`."""
        return await self._caller.run(calls.prefetched(prefetch_id), timeout)

    async def cancel(self, prefetch_id: str, *, timeout: float | None = None) -> None:
        """See `Client.cancel`."""
        await self._caller.run(calls.cancel(prefetch_id), timeout)

    async def hint(
        self,
        ns: str,
        keys: Sequence[bytes],
        hint: Hint = NO_HINT,
        *,
        first: int = 0,
        dead_from_depth: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """See `Client.hint`."""
        await self._caller.run(calls.hint(ns, keys, hint, first, dead_from_depth), timeout)

    async def end_session(self, session: str, *, timeout: float | None = None) -> None:
        """See `Client.end_session`."""
        await self._caller.run(calls.end_session(session), timeout)

    # ---- namespaces

    async def create_namespace(
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
        """See `Client.create_namespace`."""
        return await self._caller.run(calls.create_namespace(name, layout, model, numerics, lora, scheme), timeout)

    async def namespace(self, name: str, *, timeout: float | None = None) -> Namespace:
        """See `Client.namespace`."""
        return await self._caller.run(calls.namespace(name), timeout)

    async def namespaces(self, *, timeout: float | None = None) -> list[Namespace]:
        """See `Client.namespaces`."""
        return await self._caller.run(calls.namespaces(), timeout)

    async def clear_namespace(self, name: str, *, timeout: float | None = None) -> None:
        """See `Client.clear_namespace`."""
        await self._caller.run(calls.clear_namespace(name), timeout)

    async def drop_namespace(self, name: str, *, timeout: float | None = None) -> None:
        """See `Client.drop_namespace`."""
        await self._caller.run(calls.drop_namespace(name), timeout)

    # ---- the whole

    async def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """See `Client.stats`."""
        return await self._caller.run(calls.stats(), timeout)

    async def tenants(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """See `Client.tenants`."""
        tenants: list[dict[str, Any]] = (await self._caller.run(calls.stats("tenants"), timeout))["tenants"]
        return tenants

    def events(
        self, since: str | None = None, *, silence: float = 60.0, patience: float = math.inf
    ) -> AsyncIterator[Event | Gap]:
        """See `Client.events`."""
        return Following(self.options, since, patience).async_events(self._caller, silence)

    # ---- scope admin

    async def drain(self, *, timeout: float | None = None) -> None:
        """See `Client.drain`."""
        await self._caller.run(calls.admin("drain"), timeout)

    async def resume(self, *, timeout: float | None = None) -> None:
        """See `Client.resume`."""
        await self._caller.run(calls.admin("resume"), timeout)

    async def flush(self, *, timeout: float | None = None) -> None:
        """See `Client.flush`."""
        await self._caller.run(calls.admin("flush"), timeout)

    async def compact(self, *, timeout: float | None = None) -> dict[str, dict[str, int]]:
        """See `Client.compact`."""
        done: dict[str, dict[str, int]] = (await self._caller.run(calls.admin("compact"), timeout))["tenants"]
        return done

    async def set_capacity(self, tenant: str, tier: str, nbytes: int, *, timeout: float | None = None) -> int:
        """See `Client.set_capacity`."""
        asked = {"tenant": tenant, "tier": tier, "bytes": nbytes}
        return int((await self._caller.run(calls.admin("capacity", asked), timeout))["bytes"])

    async def set_policy(self, tenant: str, policy: str, *, timeout: float | None = None) -> None:
        """See `Client.set_policy`."""
        await self._caller.run(calls.admin("policy", {"tenant": tenant, "policy": policy}), timeout)

    async def close(self) -> None:
        """End its connections. Idempotent."""
        await self._caller.close()
        await asyncio.to_thread(self._ways.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
