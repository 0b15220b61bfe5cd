"""How tests wait: for a condition, and only as a last resort for a time."""

import time
from collections.abc import Callable

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
