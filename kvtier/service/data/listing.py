"""List: which blocks a namespace has, answer by answer."""

from kvtier.keys import STORE_KEY_BYTES
from kvtier.service.data.exchange import Exchange
from kvtier.service.data.session import Session
from kvtier.wire.frames import MAX_HEAD, Flag
from kvtier.wire.messages import List, Listed, decode, encode

__all__ = ["answer_list"]

_KEYS = MAX_HEAD // 4 // STORE_KEY_BYTES


def answer_list(exchange: Exchange, session: Session, head: memoryview) -> None:
    """All answers but the last, which is empty, have keys."""
    asked = decode(List, head)
    for keys in session.cache.listed(session.caller, asked.ns):
        for start in range(0, len(keys), _KEYS):
            exchange.answer(encode(Listed(b"".join(keys[start : start + _KEYS]))), flags=Flag.MORE)
    exchange.answer(encode(Listed()))
