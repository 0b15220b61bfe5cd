"""A prefill server and its client, over a real socket and a real directory."""

import stat
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from disaggregated_world import (
    BLOCKS,
    CHUNK,
    PROMPT,
    RunningPrefill,
    raw_exchange,
    tiny_prefill_llm,
)
from patience import until

from kvtier.disaggregated import PrefillClient, PrefillServer
from kvtier.disaggregated.handover import Outcome
from kvtier.disaggregated.messages import MAX_FRAME, PROTOCOL, Cancel, Hello, Refused, Submit, from_prefill, to_frame
from kvtier.errors import ConfigError, KVTierError, TierUnavailable
from kvtier.tiers import Full


def test_blocks_are_there_while_prefill_still_runs(prefill: RunningPrefill, client: PrefillClient) -> None:
    prefill.model.let(0)
    seen: list[tuple[int, int]] = []
    handover = client.submit(PROMPT, BLOCKS, arrived=lambda start, stop: seen.append((start, stop)))
    limit = prefill.crawl(handover)
    assert not handover.computed
    assert not handover.future.done()
    assert prefill.visible(PROMPT)[: handover.blocks] == [True] * handover.blocks
    assert not any(prefill.visible(PROMPT)[limit // 4 :])

    prefill.model.let(len(PROMPT))
    assert handover.future.result(20) == Outcome("finished", BLOCKS)
    assert handover.computed
    assert all(prefill.visible(PROMPT))
    assert [start for start, _ in seen] == [0, *(stop for _, stop in seen[:-1])]
    assert seen[-1][1] == BLOCKS


def test_a_remote_tier_is_not_taken_for_the_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    shared = tmp_path / "objects"
    shared.mkdir()
    llm = tiny_prefill_llm(monkeypatch, tmp_path / "kv", remote={"url": shared.as_uri()})
    running = RunningPrefill(llm, tmp_path / "prefill")
    client = PrefillClient(running.path, running.identity)
    try:
        assert running.side.directory.name == "nvme"
        assert client.submit(PROMPT, BLOCKS).future.result(20) == Outcome("finished", BLOCKS)
        assert all(running.visible(PROMPT))
    finally:
        client.close()
        running.stop()
        llm.close()


def test_what_is_there_already_is_reported_and_not_computed(prefill: RunningPrefill, client: PrefillClient) -> None:
    assert client.submit(PROMPT, BLOCKS).future.result(20) == Outcome("finished", BLOCKS)
    computed = prefill.llm.stats().computed_tokens
    # One token more than the blocks hold, which is all that is left to do.
    again = client.submit(PROMPT[: BLOCKS * 4 + 1], BLOCKS)
    assert again.future.result(20) == Outcome("finished", BLOCKS)
    assert prefill.llm.stats().computed_tokens == computed + 1


def test_many_prompts_of_two_engines_at_once(prefill: RunningPrefill, client: PrefillClient) -> None:
    other = PrefillClient(prefill.path, prefill.identity)
    prompts = [[1 + number, *PROMPT[: 20 + 10 * number]] for number in range(6)]
    handovers = [one.submit(prompt, (len(prompt) - 1) // 4) for prompt in prompts for one in (client, other)]
    assert [handover.future.result(20).ending for handover in handovers] == ["finished"] * 12
    assert all(all(prefill.visible(prompt)) for prompt in prompts)
    until(lambda: client.peer_jobs == other.peer_jobs == prefill.server.jobs == 0)
    other.close()


@pytest.mark.parametrize("place", ["directory", "host"])
def test_a_tier_that_is_slow_to_take_its_first_block_is_waited_for(
    prefill: RunningPrefill, client: PrefillClient, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    store = prefill.llm.store
    tier = store.host if place == "host" else store.lower[-1]
    reserve, slow = tier.reserve, [1.5]

    def reserve_slowly(*arguments: Any) -> Any:
        time.sleep(slow.pop() if slow else 0)
        return reserve(*arguments)

    monkeypatch.setattr(tier, "reserve", reserve_slowly)
    assert client.submit(PROMPT, BLOCKS).future.result(20) == Outcome("finished", BLOCKS)


def test_what_is_dropped_on_its_way_is_not_waited_for(
    prefill: RunningPrefill, client: PrefillClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = prefill.llm.store.lower[-1]
    monkeypatch.setattr(tier, "reserve", lambda refs, *rest: [Full("no room") for _ in refs])
    assert client.submit(PROMPT, BLOCKS).future.result(20) == Outcome("finished", 0)


def test_what_the_directory_lost_and_host_still_holds_is_written_again(
    prefill: RunningPrefill, client: PrefillClient
) -> None:
    assert client.submit(PROMPT, BLOCKS).future.result(20) == Outcome("finished", BLOCKS)
    prefill.llm.store.lower[-1].remove(prefill.side.keys(PROMPT)[3:])
    until(lambda: not any(prefill.visible(PROMPT)[3:]))
    computed = prefill.llm.stats().computed_tokens
    assert client.submit(PROMPT, BLOCKS).future.result(20) == Outcome("finished", BLOCKS)
    assert all(prefill.visible(PROMPT))
    assert prefill.llm.stats().computed_tokens < computed + len(PROMPT)


def test_a_cancelled_prompt_is_computed_no_further(prefill: RunningPrefill, client: PrefillClient) -> None:
    prefill.model.let(0)
    handover = client.submit(PROMPT, BLOCKS)
    limit = prefill.crawl(handover)
    handover.cancel()
    assert handover.future.result(20).ending == "cancelled"
    until(lambda: prefill.server.jobs == 0)
    prefill.model.let(len(PROMPT))
    stats = prefill.llm.stats
    until(lambda: stats().free_blocks == stats().num_blocks)
    assert stats().computed_tokens <= limit + CHUNK
    handover.cancel()  # of no effect


def test_the_prompts_of_an_engine_that_goes_away_are_cancelled(prefill: RunningPrefill) -> None:
    client = PrefillClient(prefill.path, prefill.identity)
    prefill.model.let(0)
    handover = client.submit(PROMPT, BLOCKS)
    prefill.crawl(handover)
    client.close()
    assert handover.future.result(0).ending == "lost"
    until(lambda: prefill.server.jobs == 0)
    with pytest.raises(KVTierError, match="closed"):
        client.submit(PROMPT, BLOCKS)
    client.close()


def test_a_server_that_ends_loses_its_prompts_and_another_one_is_found(
    prefill: RunningPrefill, client: PrefillClient
) -> None:
    prefill.model.let(0)
    handover = client.submit(PROMPT, BLOCKS)
    prefill.crawl(handover)
    prefill.stop()
    outcome = handover.future.result(20)
    assert outcome.ending == "lost"
    assert 0 < outcome.blocks < BLOCKS
    until(lambda: not client.connected)
    assert client.submit(PROMPT, BLOCKS).future.result(20) == Outcome("lost", 0)
    prefill.model.let(len(PROMPT))

    # The fixture stops this one.
    prefill.__init__(prefill.llm, prefill.path)
    until(lambda: client.connected)
    assert client.submit(PROMPT, BLOCKS).future.result(20) == Outcome("finished", BLOCKS)


def test_what_the_engine_refuses_has_failed(prefill: RunningPrefill, client: PrefillClient) -> None:
    assert client.submit([1] * 400, 99).future.result(20) == Outcome("failed", 0)  # longer than its context
    assert client.submit([9999] * 20, 4).future.result(20) == Outcome("failed", 0)  # unknown tokens
    assert client.submit([1] * (MAX_FRAME // 4), 4).future.result(20) == Outcome("failed", 0)  # longer than a message
    prefill.model.fails = True
    assert client.submit(PROMPT, BLOCKS).future.result(20) == Outcome("failed", 0)
    prefill.model.fails = False
    assert client.submit(PROMPT, BLOCKS).future.result(20) == Outcome("finished", BLOCKS)


def test_a_prompt_of_one_block_has_nothing_to_hand_over(client: PrefillClient) -> None:
    assert client.submit(PROMPT[:4], 0).future.result(20) == Outcome("finished", 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "another"),
        ("layout", "00"),
        ("numerics", "bf16"),
        ("scheme", "x"),
        ("directory", "f" * 32),
        ("exact", False),
    ],
)
def test_an_engine_with_other_kv_is_refused(prefill: RunningPrefill, field: str, value: str) -> None:
    other = msgspec.structs.replace(prefill.identity, **{field: value})
    with pytest.raises(ConfigError, match=f"{field} is .* in prefill and .* in decode") as caught:
        PrefillClient(prefill.path, other)
    assert str(prefill.path) in str(caught.value)


def hello(prefill: RunningPrefill, protocol: int = PROTOCOL) -> bytes:
    return to_frame(Hello(protocol, prefill.identity))


def test_another_protocol_is_refused(prefill: RunningPrefill) -> None:
    answer = from_prefill(raw_exchange(prefill.path, hello(prefill, PROTOCOL + 1))[4:])
    assert answer == Refused(f"protocol is {PROTOCOL} in prefill and {PROTOCOL + 1} in decode")


@pytest.mark.parametrize(
    "hostile",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        (MAX_FRAME + 1).to_bytes(4, "little") + b"x",
        (3).to_bytes(4, "little") + b"\xff\xff\xff",
        (0).to_bytes(4, "little"),
        to_frame(Cancel(1)),
        to_frame(Submit(1, bytes(8))),
    ],
)
def test_whoever_does_not_greet_is_let_go(prefill: RunningPrefill, client: PrefillClient, hostile: bytes) -> None:
    assert raw_exchange(prefill.path, hostile) == b""
    assert client.submit(PROMPT, BLOCKS).future.result(20) == Outcome("finished", BLOCKS)


@pytest.mark.parametrize("tokens", [b"", b"abc"])
def test_bytes_that_are_no_prompt_end_the_connection(prefill: RunningPrefill, tokens: bytes) -> None:
    raw_exchange(prefill.path, hello(prefill), Submit(1, tokens))
    assert prefill.server.jobs == 0


def test_ids_are_unique_and_greetings_too(prefill: RunningPrefill) -> None:
    prefill.model.let(CHUNK)
    submit = Submit(1, bytes(400))
    raw_exchange(prefill.path, hello(prefill), submit, submit)
    raw_exchange(prefill.path, hello(prefill), hello(prefill))
    assert prefill.server.jobs == 0


def test_the_socket_is_its_owners_and_goes_with_the_server(prefill: RunningPrefill) -> None:
    assert stat.S_IMODE(prefill.path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="listens there already"):
        PrefillServer(prefill.llm, prefill.path)
    prefill.stop()
    assert not prefill.path.exists()
    prefill.__init__(prefill.llm, prefill.path)


def test_paths_that_are_none_for_a_socket(prefill: RunningPrefill, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("somebody's")
    with pytest.raises(ConfigError, match="file or a directory"):
        PrefillServer(prefill.llm, file)
    assert file.read_text() == "somebody's"
    with pytest.raises(ConfigError, match="107 bytes"):
        PrefillServer(prefill.llm, tmp_path / ("x" * 108))
    with pytest.raises(ConfigError, match="No such file"):
        PrefillServer(prefill.llm, tmp_path / "absent" / "socket")
    with pytest.raises(TierUnavailable, match="kvtier prefill --socket"):
        PrefillClient(tmp_path / "nobody", prefill.identity)


@pytest.mark.parametrize("rule", ["leave", "second_touch"])
def test_a_directory_that_is_not_written_at_once_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rule: str
) -> None:
    llm = tiny_prefill_llm(monkeypatch, tmp_path / "kv", write=rule)
    with pytest.raises(ConfigError, match=f"write = '{rule}'"):
        PrefillServer(llm, tmp_path / "prefill")
    llm.close()
