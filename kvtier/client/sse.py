"""Server-sent events (WHATWG HTML, section 9.2): from lines to messages. No sockets."""

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Message", "Messages"]

# A message is a batch of block events; what is longer is no such server.
_LONGEST = 16 << 20


class Message(NamedTuple):
    """One event of a stream: its name (`message` where it has none), its id and its data."""

    event: str
    id: str
    data: str


class Messages:
    """Takes the lines of a stream, gives its messages. Comments, which keep a connection alive, give none.

    `last_id` is what to resume from.
    """

    def __init__(self) -> None:
        self.last_id = ""
        self._event = ""
        self._data: list[str] = []
        self._size = 0

    def take(self, line: str) -> Iterator[Message]:
        """One line without its end; yields the message that it completes, if it does.

        Raises:
            ValueError: a message that does not end.
        """
        if not line:
            if self._data:
                yield Message(self._event or "message", self.last_id, "\n".join(self._data))
            self._event, self._data, self._size = "", [], 0
            return
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._size += len(value)
            if self._size > _LONGEST:
                raise ValueError(f"an event of more than {_LONGEST} characters: this is no kvtier server")
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self.last_id = value
