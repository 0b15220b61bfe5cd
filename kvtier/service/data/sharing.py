"""Share: a client on this machine maps the tenant's host memory, and gets memory of its own to put from."""

import socket
from collections.abc import Sequence

from kvtier.attach import send_regions
from kvtier.client.stream import PlainStream, StreamClosed
from kvtier.service.cache import ServiceError
from kvtier.service.data.exchange import Exchange
from kvtier.service.data.session import Session
from kvtier.tiers import RegionShare
from kvtier.wire.messages import Share, Shared, SharedRegion, decode, encode

__all__ = ["answer_share"]


def answer_share(exchange: Exchange, session: Session, head: memoryview) -> None:
    """Answer with the regions; their descriptors follow the answer as `kvtier.attach` sends them."""
    asked = decode(Share, head)
    stream = exchange.stream
    if not session.local or not isinstance(stream, PlainStream):
        raise ServiceError("invalid", "memory is shared over the Unix socket only: connect to service.socket")
    if session.shared:
        raise ServiceError("invalid", "this connection shares memory already")
    if not session.may_share:
        raise ServiceError(
            "forbidden",
            f"token {session.caller.token} opens some of its tenant's namespaces, and the memory holds all of them: "
            "get and put over the socket, or use a token of a tenant of its own",
        )
    regions = list(session.cache.regions(session.caller))
    staging = session.stage(asked.staging).share() if asked.staging else None
    if staging is not None:
        regions.append(staging)
    session.shared = True
    told = [SharedRegion(share.region, share.nbytes, share.writable) for share in regions]
    exchange.answer(encode(Shared(told, None if staging is None else staging.region)))
    _send(stream.sock, regions)


def _send(sock: socket.socket, regions: Sequence[RegionShare]) -> None:
    try:
        send_regions(sock, regions)
    except OSError as error:
        raise StreamClosed(f"the connection broke: {error.strerror}") from error
