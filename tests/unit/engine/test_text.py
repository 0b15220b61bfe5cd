import random
from collections.abc import Iterable

import pytest

from kvtier.engine.text import TextStream


class Characters:
    """A decoder whose tokens are characters; a tilde is held back until the next one, as broken UTF-8 would be."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, ids: Iterable[int]) -> str:
        text = self.held + "".join(map(chr, ids))
        self.held = "~" if text.endswith("~") else ""
        return text[: len(text) - len(self.held)]

    def flush(self) -> str:
        held, self.held = self.held, ""
        return held


def run(text: str, stop: tuple[str, ...]) -> tuple[list[str], bool]:
    stream = TextStream(Characters(), stop)
    deltas = []
    for character in text:
        stopped = stream.push(ord(character))
        deltas.append(stream.take())
        if stopped:
            break
    stream.close()
    deltas.append(stream.take())
    assert stream.taken == stream.text == "".join(deltas)
    return deltas, stream.stopped


def reference(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """Ends with the first character that completes a stop string; of several, the one that begins first counts."""
    for end in range(len(text) + 1):
        starts = [text.find(one, 0, end) for one in stop]
        if any(at >= 0 for at in starts):
            return text[: min(at for at in starts if at >= 0)], True
    return text, False


def test_against_a_search_in_the_whole_text() -> None:
    generator = random.Random(0)
    stopped = 0
    for _ in range(3000):
        text = "".join(generator.choices("ab~", k=generator.randrange(12)))
        stop = tuple(
            "".join(generator.choices("ab~", k=generator.randint(1, 4))) for _ in range(generator.randrange(3))
        )
        deltas, was_stopped = run(text, stop)
        assert ("".join(deltas), was_stopped) == reference(text, stop), (text, stop)
        stopped += was_stopped
    assert 500 < stopped < 2500


@pytest.mark.parametrize(
    ("text", "deltas"),
    [
        ("xSTOy", ["x", "", "", "", "STOy", ""]),
        ("xSTOPy", ["x", "", "", "", "", ""]),
        ("xSSTOP", ["x", "", "S", "", "", "", ""]),
        ("xSTO", ["x", "", "", "", "STO"]),
    ],
)
def test_no_part_of_a_stop_string_is_handed_out(text: str, deltas: list[str]) -> None:
    assert run(text, ("STOP",))[0] == deltas
