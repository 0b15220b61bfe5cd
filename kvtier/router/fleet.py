"""The engines: what each of them has, has to do, and how it is."""

import asyncio
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kvtier.config import RouterSettings
from kvtier.errors import ConfigError
from kvtier.events.subscriber import Subscriber, SubscriberCounts
from kvtier.router.choice import Candidate, Reason, Weights, choose
from kvtier.router.expected import Expected
from kvtier.router.index import PrefixIndex
from kvtier.router.prompts import Prompt

__all__ = ["LOST_AFTER", "Address", "Attempt", "Engine", "Fleet", "addresses"]

LOST_AFTER = 3
"""Looks in a row that came to nothing, until nobody waits any more for what an engine was asked."""
_URL = re.compile(r"https?://[A-Za-z0-9.\-_\[\]:]+(/[A-Za-z0-9.\-_/]*)?")


class Address(NamedTuple):
    """Where an engine is. url: without the path. events, replay: ZMQ endpoints, if it publishes."""

    url: str
    events: str | None = None
    replay: str | None = None


def addresses(engines: Sequence[str], events: Sequence[str] = (), replays: Sequence[str] = ()) -> list[Address]:
    """The nth of each belong together; `-`, and what is missing at the end, is none.

    Raises:
        ConfigError: no engine, one twice, one that is no URL, or events of engines that are not there.
    """
    if not engines:
        raise ConfigError("router.engines: expected at least one URL, such as http://127.0.0.1:8000")
    cleaned = [url.rstrip("/").removesuffix("/v1") for url in engines]
    wrong = next((url for url in cleaned if not _URL.fullmatch(url)), None)
    if wrong is not None:
        raise ConfigError(f"router.engines: {wrong!r}: expected a URL such as http://127.0.0.1:8000")
    if len(set(cleaned)) < len(cleaned):
        raise ConfigError(f"router.engines: {', '.join(cleaned)}: expected each engine once")
    for name, given in (("events", events), ("replays", replays)):
        if len(given) > len(cleaned):
            raise ConfigError(f"router.{name}: {len(given)} for {len(cleaned)} engines: expected one each, - for none")
    more = [[*(None if one == "-" else one for one in given), *[None] * len(cleaned)] for given in (events, replays)]
    found = [Address(*parts) for parts in zip(cleaned, *more, strict=False)]
    lost = next((one for one in found if one.replay and not one.events), None)
    if lost is not None:
        raise ConfigError(f"router.replays: {lost.replay!r} of {lost.url}, of which router.events has none: name both")
    return found


class Engine:
    """One engine, as the router sees it. For use from one thread, but for the index.

    Args:
        address: where it is.
        settings: of the router.

    Attributes:
        index: what it has, by its events.
        up: it answers. draining: it takes nothing more. adapters: model -> LoRA adapter that it stands for (empty:
            none); None before it told its models.
        lost: set while it has not answered for so long that nobody waits for what it was asked.
        active: requests under way. computing: tokens of prompts without an answer so far.
    """

    def __init__(self, address: Address, settings: RouterSettings) -> None:
        self.url = address.url
        self.name = address.url.partition("://")[2]
        self.index = PrefixIndex(settings.index_blocks)
        self.up = self.draining = False
        self.lost = asyncio.Event()
        self._unseen = 0
        self.adapters: Mapping[str, str] | None = None
        self.active = self.computing = 0
        self._block_size = settings.block_size
        self._expected = Expected(settings.index_blocks)
        self._expected_texts = Expected(settings.index_blocks)
        self._address = address
        self._subscriber: Subscriber | None = None

    def follow(self) -> None:
        """Begin to listen to its events.

        Raises:
            ConfigError: an endpoint is none.
        """
        if self._address.events is not None:
            self._subscriber = Subscriber(self._address.events, self.index, replay_endpoint=self._address.replay)

    def close(self) -> None:
        """Listen no more."""
        if self._subscriber is not None:
            self._subscriber.close()

    @property
    def heard(self) -> SubscriberCounts:
        """What became of its events."""
        return SubscriberCounts() if self._subscriber is None else self._subscriber.counts

    @property
    def hears(self) -> bool:
        """Whether it publishes events, and they would come."""
        return self._subscriber is not None and self._subscriber.connected

    def serves(self, model: str | None) -> bool:
        """Whether it has a model, as far as is known."""
        return model is None or self.adapters is None or model in self.adapters

    def went_down(self) -> None:
        """It does not answer: what nobody told of it may be gone, too."""
        self.up = False
        self._expected.forget()
        self._expected_texts.forget()

    def missed(self) -> None:
        """A look at it came to nothing."""
        self._unseen += 1
        if self._unseen >= LOST_AFTER:
            self.lost.set()

    def seen(self) -> None:
        """It answered, or goes on with an answer."""
        self._unseen = 0
        self.lost.clear()

    def keys(self, prompt: Prompt) -> list[bytes]:
        """Of the prompt's blocks, as this engine has them."""
        adapter = (self.adapters or {}).get(prompt.model or "", "")
        return prompt.keys(self.index.block_size or self._block_size, adapter)

    def expects(self, prompt: Prompt) -> Expected:
        """What it will have, as far as this prompt is concerned."""
        if prompt.tokens is None:
            return self._expected_texts
        if self.hears:
            # What was guessed before its events came is known now.
            self._expected.forget()
        return self._expected

    def tells(self, prompt: Prompt) -> bool:
        """Whether its events say what becomes of a prompt: not of one that is only known as text."""
        return self.hears and prompt.tokens is not None

    def candidate(self, prompt: Prompt) -> Candidate:
        """What it has of a prompt, and to do."""
        width = prompt.block_tokens(self.index.block_size or self._block_size)
        blocks = self.index.match(self.keys(prompt), self.expects(prompt))
        return Candidate(self.name, [count * width for count in blocks], self.computing, self.active)


class Attempt:
    """A request that is being sent to an engine. Ends once, and is accounted for until then.

    Attributes:
        engine: that was chosen. found: tokens of the prompt that it has, by level. reason: why it was chosen.
    """

    def __init__(self, engine: Engine, prompt: Prompt, found: Sequence[int], reason: Reason) -> None:
        self.engine = engine
        self.found = found
        self.reason: Reason = reason
        self._prompt = prompt
        self._expected = engine.expects(prompt)
        self._keys = engine.keys(prompt)
        self._computing = max(prompt.size - sum(found), 0)
        self._answered = self._ended = False
        self._expected.begin(self._keys)
        engine.active += 1
        engine.computing += self._computing

    @property
    def is_answered(self) -> bool:
        """Whether the first byte of the answer came."""
        return self._answered

    def answered(self) -> None:
        """It came: the prompt is computed. Idempotent."""
        if not self._answered:
            self._answered = True
            self.engine.computing -= self._computing

    def end(self) -> None:
        """It is over. Idempotent."""
        if self._ended:
            return
        self._ended = True
        if not self._answered:
            self.engine.computing -= self._computing
        self.engine.active -= 1
        self._expected.end(self._keys, keep=self._answered and not self.engine.tells(self._prompt))


class Fleet:
    """All engines.

    Args:
        places: of the engines.
        settings: of the router.
    """

    def __init__(self, places: Sequence[Address], settings: RouterSettings) -> None:
        self.engines = [Engine(place, settings) for place in places]
        host, storage = settings.host_share, settings.storage_share
        self._weights = Weights((1.0, host, storage, storage), settings.decode_tokens)

    def usable(self, model: str | None, but: Collection[Engine] = ()) -> list[Engine]:
        """Engines that take requests for a model."""
        return [one for one in self.engines if one.up and not one.draining and one.serves(model) and one not in but]

    def begin(self, prompt: Prompt, but: Collection[Engine] = ()) -> Attempt | None:
        """Choose an engine for a prompt, and count it in; None if there is none left.

        Args:
            prompt: of the request.
            but: engines that were tried in vain.
        """
        usable = self.usable(prompt.model, but)
        if not usable:
            return None
        candidates = [engine.candidate(prompt) for engine in usable]
        choice = choose(candidates, prompt.size, prompt.anchor, self._weights)
        return Attempt(usable[choice.at], prompt, candidates[choice.at].found, choice.reason)

    def close(self) -> None:
        """Follow nobody any more."""
        for engine in self.engines:
            engine.close()
