"""What each request does. Verbs whose answer is a head are here; those that move bytes have modules of their own."""

import json
from collections.abc import Callable, Mapping
from typing import TypeAlias, TypeVar

import msgspec

from kvtier.hints import RequestHints
from kvtier.service.cache import (
    NamespaceInfo,
    NamespaceSpec,
    PrefetchInfo,
    ServiceError,
    layout_as_data,
    layout_from_data,
)
from kvtier.service.data.exchange import Exchange
from kvtier.service.data.listing import answer_list
from kvtier.service.data.reading import answer_get, answer_lease
from kvtier.service.data.session import Session
from kvtier.service.data.sharing import answer_share
from kvtier.service.data.writing import answer_put, answer_stage
from kvtier.wire import messages as wire
from kvtier.wire.frames import Opcode
from kvtier.wire.packing import pack_runs, unpack_tokens

__all__ = ["HANDLERS"]

Handler: TypeAlias = Callable[[Exchange, Session, memoryview], None]
_Q = TypeVar("_Q", bound=msgspec.Struct)


def _match(session: Session, asked: wire.Match) -> wire.Matched:
    keys = session.packed_keys(asked.keys, asked.width)
    tiers = session.cache.match(session.caller, asked.ns, keys, lossy=asked.lossy, depth=asked.depth)
    return wire.Matched(pack_runs(tiers))


def _match_tokens(session: Session, asked: wire.MatchTokens) -> wire.TokensMatched:
    tokens = unpack_tokens(asked.tokens)
    keys, tiers = session.cache.match_tokens(
        session.caller, asked.ns, tokens.tolist(), asked.extras or None, lossy=asked.lossy
    )
    return wire.TokensMatched(b"".join(keys), pack_runs(tiers))


def _delete(session: Session, asked: wire.Delete) -> wire.Deleted:
    return wire.Deleted(session.cache.delete(session.caller, asked.ns, session.keys(asked.keys, asked.width)))


def _pin(session: Session, asked: wire.Pin) -> wire.Pinned:
    pin = session.cache.pin(session.caller, asked.ns, session.keys(asked.keys, asked.width), asked.ttl)
    return wire.Pinned(pin.id, pin.blocks, pin.expires)


def _unpin(session: Session, asked: wire.Unpin) -> wire.Done:
    session.cache.unpin(session.caller, asked.id)
    return wire.Done()


def _prefetch(session: Session, asked: wire.Prefetch) -> wire.PrefetchAnswer:
    keys, until = session.keys(asked.keys, asked.width), session.deadline(asked.timeout)
    return _told(session.cache.prefetch(session.caller, asked.ns, keys, deadline=until, depth=asked.depth))


def _prefetched(session: Session, asked: wire.Prefetched) -> wire.PrefetchAnswer:
    return _told(session.cache.prefetched(session.caller, asked.id))


def _cancel(session: Session, asked: wire.Cancel) -> wire.PrefetchAnswer:
    return _told(session.cache.cancel(session.caller, asked.id))


def _told(info: PrefetchInfo) -> wire.PrefetchAnswer:
    return wire.PrefetchAnswer(info.id, info.state, info.blocks)


def _hint(session: Session, asked: wire.HintKeys) -> wire.Done:
    hint = asked.hint
    hints = RequestHints(
        hint.priority,
        hint.priority_ttl,
        hint.ttl,
        asked.reuse or hint.reuse,
        asked.dead_from_depth,
        hint.session,
    )
    session.cache.hint(session.caller, asked.ns, session.keys(asked.keys, asked.width), hints, first=asked.first)
    return wire.Done()


def _end_session(session: Session, asked: wire.EndSession) -> wire.Done:
    session.cache.end_session(session.caller, asked.session)
    return wire.Done()


def _namespaces(session: Session, asked: wire.Namespaces) -> wire.NamespacesAnswer:
    if asked.name is not None:
        return wire.NamespacesAnswer([_described(session.cache.namespace(session.caller, asked.name))])
    return wire.NamespacesAnswer([_described(info) for info in session.cache.namespaces(session.caller)])


def _create(session: Session, asked: wire.Create) -> wire.NamespacesAnswer:
    try:
        layout = None if asked.layout is None else layout_from_data(json.loads(asked.layout))
    except (ValueError, TypeError, RecursionError) as error:
        raise ServiceError("invalid", f"layout: no JSON object ({error})") from error
    spec = NamespaceSpec(asked.name, layout, asked.model, asked.numerics, asked.lora, asked.scheme)
    return wire.NamespacesAnswer([_described(session.cache.create_namespace(session.caller, spec))])


def _described(info: NamespaceInfo) -> wire.NamespaceHead:
    spec = info.spec
    return wire.NamespaceHead(
        spec.name,
        None if spec.layout is None else json.dumps(layout_as_data(spec.layout)),
        spec.model,
        spec.numerics,
        spec.lora,
        spec.scheme,
        info.fingerprint or b"",
        info.parts,
        list(info.block_bytes),
        info.created,
        info.stored,
        info.stored_bytes,
        info.hits,
        info.misses,
        info.host_blocks,
        info.host_bytes,
    )


def _stats(session: Session, asked: wire.Stats) -> wire.StatsAnswer:
    del asked
    return wire.StatsAnswer(session.cache.stats(session.caller).as_data())


def _release(session: Session, asked: wire.Release) -> wire.Done:
    for lease in asked.leases:
        session.release(lease)
    return wire.Done()


def _plain(kind: type[_Q], verb: Callable[[Session, _Q], msgspec.Struct]) -> Handler:
    def handle(exchange: Exchange, session: Session, head: memoryview) -> None:
        answer = verb(session, wire.decode(kind, head))
        if not exchange.quiet:
            exchange.owe(wire.encode(answer))

    return handle


HANDLERS: Mapping[Opcode, Handler] = {
    Opcode.MATCH: _plain(wire.Match, _match),
    Opcode.MATCH_TOKENS: _plain(wire.MatchTokens, _match_tokens),
    Opcode.DELETE: _plain(wire.Delete, _delete),
    Opcode.PIN: _plain(wire.Pin, _pin),
    Opcode.UNPIN: _plain(wire.Unpin, _unpin),
    Opcode.PREFETCH: _plain(wire.Prefetch, _prefetch),
    Opcode.PREFETCHED: _plain(wire.Prefetched, _prefetched),
    Opcode.CANCEL: _plain(wire.Cancel, _cancel),
    Opcode.HINT: _plain(wire.HintKeys, _hint),
    Opcode.END_SESSION: _plain(wire.EndSession, _end_session),
    Opcode.NAMESPACES: _plain(wire.Namespaces, _namespaces),
    Opcode.CREATE: _plain(wire.Create, _create),
    Opcode.STATS: _plain(wire.Stats, _stats),
    Opcode.RELEASE: _plain(wire.Release, _release),
    Opcode.GET: answer_get,
    Opcode.LEASE: answer_lease,
    Opcode.PUT: answer_put,
    Opcode.STAGE: answer_stage,
    Opcode.SHARE: answer_share,
    Opcode.LIST: answer_list,
}
