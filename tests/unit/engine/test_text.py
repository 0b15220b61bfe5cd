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


def run(text: str, stop: tuple[str, ...], min_tokens: int = 0) -> tuple[list[str], bool]:
    stream = TextStream(Characters(), stop, min_tokens)
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


def reference(text: str, stop: tuple[str, ...], min_tokens: int) -> tuple[str, bool]:
    """Ends with the first token that completes a stop string; of several, the one that begins first counts."""
    known = 0
    for token in range(1, len(text) + 2):  # the last one is the end, which brings what was held back
        end = min(token, len(text)) - (token <= len(text) and text[token - 1] == "~")
        starts = [at - len(one) for one in stop for at in range(known + 1, end + 1) if text[:at].endswith(one)]
        if starts and token > min_tokens:
            return text[: min(starts)], True
        known = end
    return text, False


def test_against_a_search_in_the_whole_text() -> None:
    generator = random.Random(0)
    stopped = spared = 0
    for _ in range(3000):
        text = "".join(generator.choices("ab~", k=generator.randrange(12)))
        stop = tuple(
            "".join(generator.choices("ab~", k=generator.randint(1, 4))) for _ in range(generator.randrange(3))
        )
        min_tokens = generator.choice((0, 0, 2, 5))
        deltas, was_stopped = run(text, stop, min_tokens)
        assert ("".join(deltas), was_stopped) == reference(text, stop, min_tokens), (text, stop, min_tokens)
        stopped += was_stopped
        spared += len("".join(deltas)) > len(reference(text, stop, 0)[0])
    assert 500 < stopped < 2500
    assert spared > 200


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
