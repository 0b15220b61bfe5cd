"""uvicorn's connection, for which headers are what stands in a request's head."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["HeadProtocol"]


class HeadProtocol(HttpToolsProtocol):
    """One connection.

    uvicorn adds the fields that follow a chunked body (RFC 9110, 6.5) to the headers, of which nobody may have asked
    yet: one that grants something there would count or not, as the packets come.

    Args:
        options: uvicorn's.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._in_head = True

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of a head, or of what follows a body."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A head is whole."""
        self._in_head = False
        super().on_headers_complete()
