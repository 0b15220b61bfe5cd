"""A follower whose view can be compared, and a wait."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from patience import PATIENCE

from kvtier.events.frames import BlockEvent, BlocksCleared, BlockStored


class View:
    """What a stream of events says is where: medium -> hash -> (parent, tokens)."""

    def __init__(self) -> None:
        self.media: dict[str, dict[Any, tuple[Any, tuple[int, ...]]]] = {}
        self.resets = 0
        self.gate = threading.Event()
        self.gate.set()

    def apply(self, events: Sequence[BlockEvent]) -> None:
        self.gate.wait(PATIENCE)
        for event in events:
            if isinstance(event, BlocksCleared):
                self.media.clear()
                continue
            held = self.media.setdefault(event.medium or "GPU", {})
            if not isinstance(event, BlockStored):
                for one in event.block_hashes:
                    held.pop(one, None)
                continue
            parent, size = event.parent_block_hash, event.block_size
            for at, one in enumerate(event.block_hashes):
                held[one] = (parent, tuple(event.token_ids[at * size : (at + 1) * size]))
                parent = one

    def reset(self) -> None:
        self.resets += 1
        self.media.clear()

    def hashes(self, medium: str = "GPU") -> set[Any]:
        return set(self.media.get(medium, ()))


def folded(events: Iterable[BlockEvent]) -> dict[str, dict[Any, tuple[Any, tuple[int, ...]]]]:
    view = View()
    view.apply(list(events))
    return {medium: held for medium, held in view.media.items() if held}
