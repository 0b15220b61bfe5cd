"""Tokens as text and as bytes, which the logprobs of OpenAI's API are told in."""

import re
from functools import cache
from typing import NamedTuple

from kvtier.engine.tokenizer import Tokenizer

__all__ = ["TokenText", "TokenTexts"]

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_REPLACEMENT = "\ufffd"
_ANCHOR = "a"


class TokenText(NamedTuple):
    """text: U+FFFD for bytes that are a part of a character only. data: the bytes themselves."""

    text: str
    data: bytes

    @property
    def label(self) -> str:
        """As completions name tokens: the text, or, where that says too little, its bytes in hexadecimal."""
        if _REPLACEMENT not in self.text:
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


class TokenTexts:
    """What each token stands for. Pieces are remembered: the likely ones come again and again.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Decoders may treat the first token of a text in a way of its own: each is looked at behind this one.
        self._anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False)
        self._skip = len(tokenizer.decode(self._anchor, skip_special=False))
        self._known: dict[int, TokenText] = {}

    def __getitem__(self, token: int) -> TokenText:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._look_up(token)
        return found

    def _look_up(self, token: int) -> TokenText:
        text = self._tokenizer.decode([*self._anchor, token], skip_special=False)[self._skip :]
        if _REPLACEMENT not in text:
            return TokenText(text, text.encode())
        piece: str = self._tokenizer.backend.id_to_token(token) or ""
        return TokenText(text, _raw_bytes(piece))


def _raw_bytes(piece: str) -> bytes:
    """Bytes of a vocabulary entry: a byte token of SentencePiece, or the printable alphabet of byte-level BPE."""
    if match := _BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    alphabet = _byte_alphabet()
    if all(letter in alphabet for letter in piece):
        return bytes(alphabet[letter] for letter in piece)
    return piece.encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    """Letter -> byte, as GPT-2 wrote bytes: printable ones as themselves, the others from U+0100 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
