"""What decides: tokens to compute and load in one unit; what was sent where; what a body's prompt is."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from kvtier.config import RouterSettings
from kvtier.errors import ConfigError, KVTierError
from kvtier.router.choice import Candidate, Weights, choose
from kvtier.router.expected import Expected
from kvtier.router.fleet import Address, Fleet, addresses
from kvtier.router.hashing import pack_extra, text_keys, token_keys
from kvtier.router.prompts import EngineTokens, NoTokens, Prompt, prompt_of

WEIGHTS = Weights((1.0, 0.9, 0.7, 0.7), 64)


def at(name: str, *found: int, computing: int = 0, active: int = 0) -> Candidate:
    return Candidate(name, [*found, *[0] * (4 - len(found))], computing, active)


@pytest.mark.parametrize(
    ("candidates", "chosen", "reason"),
    [
        ([at("a"), at("b", 100)], 1, "prefix"),
        ([at("a", 300), at("b", 400)], 1, "prefix"),
        ([at("a", 0, 400), at("b", 370)], 1, "prefix"),  # 360 tokens' worth in host against 370 on the device
        ([at("a", 0, 400), at("b", 350)], 0, "prefix"),
        ([at("a", 0, 0, 400), at("b", 300)], 1, "prefix"),
        ([at("a", 500, active=5), at("b", active=1)], 0, "prefix"),
        ([at("a", 500, active=9), at("b", active=1)], 1, "spill"),
        ([at("a", 500, computing=600), at("b")], 1, "spill"),
        ([at("a", computing=1), at("b")], 1, "load"),
        ([at("a", active=2), at("b", active=3)], 0, "load"),
        ([at("a", 64, active=1), at("b")], 1, "spill"),  # as much work: the fewer requests
    ],
)
def test_the_least_work_wins(candidates: list[Candidate], chosen: int, reason: str) -> None:
    assert choose(candidates, 1000, b"x", WEIGHTS) == (chosen, reason)
    assert choose(candidates[::-1], 1000, b"x", WEIGHTS) == (len(candidates) - 1 - chosen, reason)


def test_idle_equals_are_shared_out_by_prompt_and_most_stay_when_one_leaves() -> None:
    engines = [at(name) for name in "abcd"]
    homes = {anchor: engines[choose(engines, 9, anchor.encode(), WEIGHTS).at].name for anchor in map(str, range(400))}
    shares = [list(homes.values()).count(name) for name in "abcd"]
    assert min(shares) > 60
    left = engines[:3]
    for anchor, home in homes.items():
        now = left[choose(left, 9, anchor.encode(), WEIGHTS).at].name
        assert now == home or home == "d"


def test_requests_without_a_prompt_are_shared_out() -> None:
    fleet = Fleet([Address(f"http://{name}") for name in "abc"], RouterSettings())
    for engine in fleet.engines:
        engine.up = True
    assert len({fleet.begin(Prompt(None, None, "")).engine.name for _ in range(3)}) == 3, "by load"
    assert len({Prompt(None, None, "").anchor for _ in range(9)}) == 9


def test_expected_under_way_and_kept() -> None:
    short, kept = Expected(3), Expected(3)
    for expected in (short, kept):
        expected.begin([b"1", b"2"])
        expected.begin([b"1"])
        expected.end([b"1", b"2"], keep=expected is kept)
        assert b"1" in expected
        expected.end([b"1"], keep=False)
    assert len(short) == 0
    assert b"1" in kept
    assert b"2" in kept
    for keys in ([b"1", b"3"], [b"1", b"4"]):
        kept.begin(keys)
        kept.end(keys, keep=True)
    assert [key in kept for key in (b"1", b"2", b"3", b"4")] == [True, False, True, True], "the tail nobody shares went"
    kept.forget()
    assert b"1" not in kept


# ---- prompts


def read(body: Any, tokens: Any = None) -> Prompt:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return asyncio.run(prompt_of(content, {"authorization": "Bearer k"}, tokens or NoTokens()))


class Asked:
    """An engine that makes a token of each letter."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fields: list[Mapping[str, Any]] = []
        self.fails = fails
        self.failures = 0

    async def __call__(self, fields: Mapping[str, Any], headers: Mapping[str, str]) -> list[int]:
        self.fields.append(fields)
        assert headers == {"authorization": "Bearer k"}
        if self.fails:
            raise KVTierError("no")
        return [ord(letter) for letter in fields.get("prompt") or json.dumps(fields["messages"])]

    def failed(self) -> None:
        self.failures += 1

    @property
    def tokens(self) -> EngineTokens:
        return EngineTokens(self, self.failed)


def test_tokens_come_from_the_body_or_from_an_engine() -> None:
    asked = Asked()
    assert read({"prompt": [1, 2, 3]}, asked.tokens).tokens == [1, 2, 3]
    assert read({"prompt": [[4, 5], [6]]}, asked.tokens).tokens == [4, 5]
    assert asked.fields == []
    assert read({"prompt": ["ab", "cd"], "model": "m", "temperature": 1}, asked.tokens).tokens == [97, 98]
    talk = [{"role": "user", "content": "hi"}]
    prompt = read({"messages": talk, "tools": [], "stream": True}, asked.tokens)
    assert prompt.tokens == [ord(letter) for letter in json.dumps(talk)]
    assert asked.fields == [{"prompt": "ab", "model": "m"}, {"messages": talk, "tools": []}]
    assert prompt.keys(4) == token_keys(prompt.tokens, 4)


def test_without_tokens_the_text_stands_for_them() -> None:
    asked = Asked(fails=True)
    prompt = read({"prompt": "x" * 640}, asked.tokens)
    assert asked.failures == 1
    assert prompt.tokens is None
    assert prompt.keys(16) == text_keys("x" * 640, "\0")
    assert (prompt.size, prompt.block_tokens(999), len(prompt.keys(16))) == (160, 16, 10)
    talk = [{"role": "user", "content": "y" * 100}, {"role": "assistant", "content": "z" * 100}]
    longer = [*talk, {"role": "user", "content": "more " * 30}]
    begun, gone_on = read({"messages": talk}).keys(16), read({"messages": longer}).keys(16)
    assert begun
    assert gone_on[: len(begun)] == begun, "a conversation that goes on begins like before"


def test_salts_and_adapters_separate_prompts() -> None:
    body = {"prompt": list(range(32))}
    plain, salted = read(body), read(body | {"cache_salt": "s"})
    assert plain.keys(16) != salted.keys(16)
    assert salted.keys(16) == token_keys(range(32), 16, extras={0: pack_extra(["s"])})
    assert plain.keys(16, "fr") == token_keys(range(32), 16, extras=[pack_extra(["fr"])] * 2)
    assert plain.anchor != salted.anchor
    assert read({"prompt": "a" * 99}).keys(16) != read({"prompt": "a" * 99, "cache_salt": "s"}).keys(16)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\xff", b"[" * 100_000, b"null", b"[1]", {}, {"prompt": None}, {"prompt": {}}, {"prompt": []},
        {"prompt": [[]]}, {"prompt": [True]}, {"prompt": [1.5]}, {"prompt": [[["x"]]]}, {"messages": 7},
        {"messages": [7]}, {"messages": []},
        {"prompt": 5, "model": 7, "cache_salt": []}, {"prompt": [-1] * 64}, {"prompt": [2**80] * 64},
        {"prompt": "\ud800" * 99}, {"prompt": [1] * 64, "cache_salt": "\ud800"},
    ],
)  # fmt: skip
def test_whatever_a_body_says_it_has_a_prompt(body: Any) -> None:
    prompt = read(body)
    assert isinstance(prompt.keys(16), list)
    assert prompt.size >= 0
    assert prompt.anchor


# ---- addresses, accounting


def test_addresses_belong_together_by_place() -> None:
    found = addresses(["http://a:1/", "https://b/v1", "http://c"], ["tcp://a:2", "-", "tcp://c:2"], ["tcp://a:3"])
    assert found == [
        Address("http://a:1", "tcp://a:2", "tcp://a:3"),
        Address("https://b", None, None),
        Address("http://c", "tcp://c:2", None),
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([],), "at least one URL"),
        ((["a:8000"],), "'a:8000': expected a URL"),
        ((["http://a b"],), "expected a URL"),
        ((["http://a?x=1"],), "expected a URL"),
        ((["http://a", "http://a/"],), "each engine once"),
        ((["http://a"], ["tcp://x", "tcp://y"]), "router.events: 2 for 1 engines"),
        ((["http://a"], ["-"], ["tcp://y"]), "router.replays: 'tcp://y' of http://a"),
    ],
)
def test_wrong_addresses_are_named(given: tuple[list[str], ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        addresses(*given)


def test_load_is_counted_until_the_answer_begins_and_ends() -> None:
    fleet = Fleet([Address("http://a")], RouterSettings(block_size=4))
    engine = fleet.engines[0]
    prompt = Prompt(None, list(range(40)), "")
    assert fleet.begin(prompt) is None, "nobody is up"
    engine.up = True
    first = fleet.begin(prompt)
    assert (engine.active, engine.computing, first.reason) == (1, 40, "load")
    second = fleet.begin(prompt)
    assert (engine.active, engine.computing, second.reason) == (2, 40, "prefix"), "expected to be there soon"
    second.end()
    first.answered()
    assert (engine.active, engine.computing) == (1, 0)
    first.answered()
    first.end()
    first.end()
    assert (engine.active, engine.computing) == (0, 0)
    assert fleet.begin(prompt, [engine]) is None
    assert fleet.begin(prompt).found[0] == 40, "an engine that tells nothing is known by what was sent there"
    engine.draining = True
    assert fleet.begin(prompt) is None
    engine.draining = False
    engine.adapters = {"base": "", "fr": "fr"}
    assert fleet.begin(Prompt("other", None, "")) is None
    french = fleet.begin(Prompt("fr", list(range(40)), ""))
    assert french.reason == "load", "an adapter's KV is its own"


def test_what_was_sent_there_counts_only_until_events_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet([Address("http://a", "ipc:///nowhere")], RouterSettings(block_size=4))
    engine = fleet.engines[0]
    engine.up = True
    prompt, text = Prompt(None, list(range(40)), ""), Prompt(None, None, "x" * 640)

    def found(one: Prompt) -> int:
        attempt = fleet.begin(one)
        attempt.answered()
        attempt.end()
        return attempt.found[0]

    assert [found(prompt), found(prompt), found(text), found(text)] == [0, 40, 0, 160], "its events do not come"
    monkeypatch.setattr(type(engine), "hears", True)
    assert [found(prompt), found(prompt), found(text)] == [0, 0, 160], "they come, and say nothing of texts"
