"""How tests wait: for a condition, and only as a last resort for a time."""

import time
from collections.abc import Callable, Iterator
from itertools import count

# A machine that is busy otherwise makes a test slow, not wrong; only one that fails waits that long.
PATIENCE = 60.0


def until(condition: Callable[[], object], what: str = "it never happened", seconds: float = PATIENCE) -> None:
    assert came_true(condition, seconds), what


def came_true(condition: Callable[[], object], seconds: float = PATIENCE) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.003)
    return True


def turns(seconds: float = PATIENCE) -> Iterator[int]:
    """Numbers, as long as there is patience: for loops that have something to do in each turn, which may be little."""
    deadline = time.monotonic() + seconds
    for number in count():
        if time.monotonic() >= deadline:
            return
        yield number
