"""The router in front of two real engines, each in a process of its own, which publish what they have."""

import re
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from patience import PATIENCE, until
from router_world import RunningRouter, engine_processes, routed

from kvtier.router.fleet import Address

SCRIPT = Path(__file__).with_name("engine_process.py")


class World(NamedTuple):
    router: RunningRouter
    engines: dict[str, subprocess.Popen[str]]

    def quiet(self) -> None:
        """All requests are through, and their events have come."""
        self.router.at_rest()
        before = None
        while before != (now := [self.told(url) for url in self.engines]):
            before = now
            threading.Event().wait(0.15)

    def told(self, url: str) -> float:
        """Messages that an engine has published, once all of them have been heard."""
        engine = next(one for one in self.router.fleet.engines if one.url == url)
        told = 0.0

        def heard() -> bool:
            nonlocal told
            text = httpx.get(f"{url}/metrics", timeout=PATIENCE, trust_env=False).text
            told = float(re.search(r"^kvtier_events_messages_total (.*)$", text, re.MULTILINE)[1])
            return engine.heard.messages == told

        until(heard)
        return told


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    place = tmp_path_factory.mktemp("fleet")
    endpoints = [(f"ipc://{place}/pub{at}", f"ipc://{place}/replay{at}") for at in range(2)]
    with engine_processes(SCRIPT, *((*pair, "0.01") for pair in endpoints)) as processes:
        places = [Address(url, *pair) for url, pair in zip(processes, endpoints, strict=True)]
        with routed(places, decode_tokens=64) as router:
            yield World(router, processes)


def prompt(name: str, length: int = 120) -> str:
    return (name * length)[:length]


def test_a_prefix_goes_where_it_is(world: World) -> None:
    router = world.router
    for name in "abcd":
        first = router.engine_of(router.complete(prompt(name) + "one"))
        world.quiet()
        for ending in ("two", "three"):
            again = router.complete(prompt(name) + ending)
            assert router.engine_of(again) == first, "the engine that has the prefix"
    assert sum(router.value("matched_tokens_total", engine=url[7:], tier="device") for url in world.engines) > 8 * 100
    reasons = [
        router.value("requests_total", engine=url[7:], reason=reason)
        for url in world.engines
        for reason in ("prefix", "load", "spill")
    ]
    assert sum(reasons) == 12
    assert sum(reasons[0::3]) == 8


def test_conversations_are_known_by_the_engine_s_own_template(world: World) -> None:
    router = world.router
    talk: list[dict[str, str]] = [{"role": "user", "content": prompt("q", 60)}]
    engines = []
    for turn in range(3):
        answer = router.http.post("/v1/chat/completions", json={"messages": talk, "max_tokens": 3})
        assert answer.status_code == 200, answer.text
        engines.append(router.engine_of(answer))
        talk += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": f"and {turn}?"}]
        world.quiet()
    assert len(set(engines)) == 1
    assert router.value("untokenized_total") == 0


def test_streams_pass_through_piece_by_piece(world: World) -> None:
    body = {"prompt": prompt("s", 40), "max_tokens": 50, "stream": True, "ignore_eos": True}
    with world.router.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        pieces = list(answer.iter_raw())
    assert len(pieces) >= 5, "not gathered into one"  # of 50: some come together where somebody is held up
    assert b"".join(pieces).endswith(b"data: [DONE]\n\n")


def test_too_much_to_do_spills_over(world: World) -> None:
    router = world.router
    shared = prompt("z")
    home = router.engine_of(router.complete(shared))
    world.quiet()
    engines: list[str] = []
    together = threading.Barrier(8)

    def ask(at: int) -> None:
        body = {"prompt": shared + str(at), "max_tokens": 120, "ignore_eos": True}
        together.wait(PATIENCE)
        answer = httpx.post(f"{router.url}/v1/completions", json=body, timeout=90, trust_env=False, verify=False)
        engines.append(router.engine_of(answer))

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    share = Counter(engines)
    assert len(share) == 2, "nobody else helped"
    assert share[home] >= 2
    assert sum(router.value("requests_total", engine=url[7:], reason="spill") for url in world.engines) >= 1
    world.quiet()


def test_a_client_that_leaves_is_no_load_any_more(world: World) -> None:
    router = world.router
    body = {"prompt": prompt("l", 40), "max_tokens": 150, "stream": True, "ignore_eos": True}
    active = 0
    for _ in range(20):  # the answer may be complete before anybody looks
        with router.http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_raw())
            active = sum(one.active for one in router.fleet.engines)
        router.at_rest()
        if active:
            break
    assert active == 1
    until(lambda: router.router.underway == 0)


def test_models_and_readiness_are_those_of_all(world: World) -> None:
    models = world.router.http.get("/v1/models").json()
    assert [row["id"] for row in models["data"]] == ["tiny"]
    assert world.router.http.get("/readyz").json() == {"status": "ready", "engines": 2}
    shown = world.router.http.get("/router/engines").json()["engines"]
    assert [one["models"] for one in shown] == [["tiny"], ["tiny"]]
    assert {one["block_size"] for one in shown} == {4}
    assert all(one["events"]["connected"] for one in shown)
    metrics = world.router.http.get("/metrics").text
    for name in (
        "index_blocks{",
        "event_gaps_total{",
        "event_resyncs_total{",
        "first_byte_seconds_bucket{",
        "engine_up{",
    ):
        assert f"kvtier_router_{name}" in metrics


def test_what_the_engine_refuses_is_told_as_it_tells_it(world: World) -> None:
    url = f"{next(iter(world.engines))}/v1/completions"
    direct = httpx.post(url, json={"prompt": 7}, timeout=PATIENCE, trust_env=False)
    routed = world.router.http.post("/v1/completions", json={"prompt": 7})
    assert (routed.status_code, routed.json()) == (direct.status_code, direct.json())
    unknown = world.router.http.post("/v1/completions", json={"prompt": "a", "model": "huge"})
    assert unknown.status_code == 404
    assert "'huge': no engine has it" in unknown.json()["error"]["message"]
    assert world.router.http.post("/v1/%2e%2e/metrics", json={}).status_code == 404
    assert world.router.http.post("/v1/completions", content=b"x" * (9 << 20)).status_code == 413


def test_an_engine_that_is_killed_is_missed_by_nobody(world: World) -> None:
    router = world.router
    shared = prompt("k")
    home = router.engine_of(router.complete(shared))
    world.quiet()
    failed: list[Any] = []
    stop = threading.Event()

    def ask(at: int) -> None:
        with httpx.Client(base_url=router.url, timeout=PATIENCE, trust_env=False, verify=False) as client:
            while not stop.is_set():
                answer = client.post("/v1/completions", json={"prompt": shared + str(at), "max_tokens": 1})
                if answer.status_code != 200:
                    failed.append(answer.text)

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    threading.Event().wait(0.3)
    world.engines[home].send_signal(signal.SIGKILL)
    until(lambda: not next(one for one in router.fleet.engines if one.url == home).up)
    threading.Event().wait(0.3)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed
    assert router.engine_of(router.complete(shared)) != home
    assert router.http.get("/readyz").json()["engines"] == 1
    assert router.value("retries_total", engine=home[7:], why="unreachable") >= 1
    router.at_rest()
