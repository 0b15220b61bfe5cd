"""The router in front of an engine that is frozen: its machine takes connections and bytes, and nothing comes back."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from patience import until
from router_world import RunningRouter, engine_processes, routed

from kvtier.router.fleet import Address, Engine

SCRIPT = Path(__file__).with_name("stopping_process.py")
PROMPT = "once upon a time " * 20
# Of a request's body, more than the buffers of two sockets.
LONG = "x" * (7 << 20)


class World(NamedTuple):
    router: RunningRouter
    engines: dict[int, subprocess.Popen[str]]

    def home(self) -> Engine:
        """The engine that gets the prompt."""
        return self.engine(self.ask(PROMPT).json()["from"])

    def engine(self, port: int) -> Engine:
        return next(one for one in self.router.fleet.engines if one.url.endswith(f":{port}"))

    def ask(self, prompt: str, told: str = "") -> httpx.Response:
        """As clients ask: again, if there is no engine just now."""
        answer = None
        headers = {"Authorization": told} if told else {}

        def answered() -> bool:
            nonlocal answer
            answer = self.router.http.post("/v1/completions", json={"prompt": prompt}, headers=headers)
            return answer.status_code != 503

        until(answered)
        assert answer.status_code == 200, answer.text
        return answer

    def goes_on(self, port: int) -> None:
        """Once it is continued, it gets requests again."""
        self.engines[port].send_signal(signal.SIGCONT)
        until(lambda: self.engine(port).up and not self.engine(port).lost.is_set())
        self.router.at_rest()


def port_of(engine: Engine) -> int:
    return int(engine.url.rpartition(":")[2])


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    settings = {"health_interval": 0.05, "connect_timeout": 1.0, "tokenizer": "text"} | getattr(request, "param", {})
    with (
        # Once continued, they write to nobody.
        engine_processes(SCRIPT, (), (), stderr=subprocess.DEVNULL) as processes,
        routed([Address(url) for url in processes], **settings) as router,
    ):
        yield World(router, dict(zip(map(port_of, router.fleet.engines), processes.values(), strict=True)))


@pytest.mark.parametrize("moment", ["body", "answer", "refusal"])
def test_what_it_was_asked_is_asked_elsewhere(world: World, moment: str) -> None:
    home = world.home()
    answer = world.ask(PROMPT + (LONG if moment == "body" else ""), f"stop {port_of(home)} {moment}")
    assert answer.json()["from"] != port_of(home)
    assert world.router.value("retries_total", engine=home.name, why="unreachable") == 1
    world.goes_on(port_of(home))


def test_an_answer_that_began_there_breaks_off(world: World) -> None:
    home = world.home()
    headers = {"Authorization": f"stop {port_of(home)} piece"}
    with world.router.http.stream("POST", "/v1/completions", json={"prompt": PROMPT}, headers=headers) as answer:
        assert answer.headers["x-kvtier-engine"] == home.name
        pieces = answer.iter_raw()
        assert next(pieces) == b"{"
        with pytest.raises(httpx.RemoteProtocolError):
            next(pieces)
    until(lambda: world.router.value("broken_total", engine=home.name) == 1)
    world.goes_on(port_of(home))
    assert json.loads(world.ask(PROMPT).content)["from"] in world.engines


@pytest.mark.parametrize("world", [{"tokenizer": "engine", "tokenize_timeout": 0.5}], indirect=True)
def test_its_tokenizer_is_waited_for_no_longer_than_that_may_take(world: World) -> None:
    first = world.router.fleet.engines[0]
    world.ask(PROMPT, f"stop {port_of(first)} tokenize")
    assert world.router.value("untokenized_total") >= 1
    world.goes_on(port_of(first))


def test_its_models_are_left_out(world: World) -> None:
    stopped, lives = world.engines
    world.engines[stopped].send_signal(signal.SIGSTOP)
    until(lambda: [row["id"] for row in world.router.http.get("/v1/models").json()["data"]] == [f"only-{lives}"])
    world.goes_on(stopped)


def test_a_router_starts_beside_it(world: World) -> None:
    stopped, lives = world.engines
    world.engines[stopped].send_signal(signal.SIGSTOP)
    places = [Address(engine.url) for engine in world.router.fleet.engines]
    another = RunningRouter(places, health_interval=0.05, connect_timeout=1.0, tokenizer="text")
    try:
        assert World(another, world.engines).ask(PROMPT).json()["from"] == lives
        World(another, world.engines).goes_on(stopped)
    finally:
        another.stop()
