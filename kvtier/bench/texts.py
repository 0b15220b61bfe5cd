"""Texts of a wanted number of tokens: common words, which most tokenizers know as one token each.

How many tokens a word has is asked of the target, so that lengths hold for any tokenizer.
"""

import random
from collections.abc import Iterable

from kvtier.bench.scripts import Piece
from kvtier.bench.targets import Question, Target

__all__ = ["Texts"]

_WORDS = tuple(
    """
    time year people way day man thing woman life child world school state family student group country
    problem hand part place case week company system program question work government number night point home
    water room mother area money story fact month lot right study book eye job word business issue side kind
    head house service friend father power hour game line end member law car city community name president
    team minute idea body information back parent face others level office door health person art war history
    party result change morning reason research girl guy moment air teacher force education
    """.split()  # noqa: SIM905  a hundred quoted words are not read more easily
)

# Enough to tell what a word costs from what the chat template costs, and few enough for the smallest context.
_FEW, _MANY = 8, 24


class Texts:
    """Writes the same text for the same seed and label.

    Args:
        seed: another one makes other texts, of which no cache knows anything.
        tokens_per_word: of the target's tokenizer.
    """

    def __init__(self, seed: int, tokens_per_word: float = 1.0) -> None:
        self._seed = seed
        self._tokens_per_word = tokens_per_word

    @classmethod
    async def for_target(cls, seed: int, target: Target) -> "Texts":
        """For the tokenizer of a target; one that does not say how many tokens a prompt had gets a word for a token.

        Raises:
            KVTierError: the target cannot be asked.
        """
        own = cls(seed)
        counts = []
        for words in (_FEW, _MANY):
            text = own.write([Piece("calibration", words)])
            counts.append(await target.count(Question(({"role": "user", "content": text},), output_tokens=1)))
        few, many = counts
        if few is None or many is None or many <= few:
            return own
        return cls(seed, (many - few) / (_MANY - _FEW))

    def write(self, pieces: Iterable[Piece]) -> str:
        """One text."""
        return " ".join(self._piece(piece) for piece in pieces)

    def _piece(self, piece: Piece) -> str:
        dice = random.Random(f"{self._seed}/{piece.label}")  # noqa: S311  no secret
        words = max(1, round(piece.tokens / self._tokens_per_word))
        return " ".join(dice.choices(_WORDS, k=words))
