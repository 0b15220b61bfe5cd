"""What befalls the transfers of `scheduler_world`: all goes well, or is late, or fails."""

from dataclasses import dataclass
from random import Random


@dataclass
class Fate:
    """What befalls transfers; by default everything goes well and at once."""

    lookup: int = 0
    starting: bool = True
    loading: bool = True
    saving: bool = True
    arriving: int | None = None
    swapping: bool = True
    keeping: bool = True
    copying: float | None = None

    def lookup_steps(self) -> int:
        return self.lookup

    def load_starts(self) -> bool:
        return self.starting

    def load_ends(self) -> bool:
        return self.loading

    def save_ends(self) -> bool:
        return self.saving

    def good_copies(self, copies: int) -> int:
        return copies if self.arriving is None else min(self.arriving, copies)

    def swaps(self) -> bool:
        return self.swapping

    def keeps(self) -> bool:
        return self.keeping

    def copy_seconds(self) -> float | None:
        return self.copying


class RandomFate(Fate):
    """Delays and failures at random."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def lookup_steps(self) -> int:
        return self._random.randrange(3)

    def load_starts(self) -> bool:
        return self._random.random() < 0.5

    def load_ends(self) -> bool:
        return self._random.random() < 0.25

    def save_ends(self) -> bool:
        return self._random.random() < 0.5

    def good_copies(self, copies: int) -> int:
        return copies if not copies or self._random.random() < 0.7 else self._random.randrange(copies)

    def swaps(self) -> bool:
        return self._random.random() < 0.8

    def keeps(self) -> bool:
        return self._random.random() < 0.8

    def copy_seconds(self) -> float | None:
        return self._random.choice((None, 0.0, 0.0, 5.0))
