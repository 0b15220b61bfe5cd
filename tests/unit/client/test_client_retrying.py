"""When a call is tried again: on a clock that the test moves, and through httpx on a transport that fails as told."""

import json
from collections.abc import Callable

import httpx
import pytest

from kvtier.client.errors import (
    Busy,
    ClientError,
    DeadlineExceeded,
    Exists,
    Interrupted,
    Invalid,
    Unreachable,
    WrongDigest,
    refused,
)
from kvtier.client.exchange import Call, Inbox
from kvtier.client.http import HttpCaller, Session
from kvtier.client.options import ClientOptions
from kvtier.client.retrying import Attempts
from kvtier.errors import ConfigError

OPTIONS = ClientOptions(timeout=5.0, attempts=4, backoff=0.1, longest_backoff=0.3)


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def attempts(clock: _Clock, chance: float = 0.5, *, idempotent: bool = True) -> Attempts:
    return Attempts(OPTIONS, idempotent=idempotent, clock=clock, chance=lambda: chance)


def test_pauses_are_drawn_from_intervals_that_double_up_to_the_longest() -> None:
    for chance in (0.0, 0.25, 0.999):
        made = attempts(_Clock(), chance)
        pauses = [made.pause(Interrupted("gone")) for _ in range(3)]
        assert pauses == pytest.approx([chance * 0.1, chance * 0.2, chance * 0.3])
        with pytest.raises(Interrupted):
            made.pause(Interrupted("gone"))


def test_verbs_that_are_not_idempotent_are_tried_once() -> None:
    with pytest.raises(Unreachable):
        attempts(_Clock(), idempotent=False).pause(Unreachable("nobody"))


@pytest.mark.parametrize(
    "error", [Invalid("no", 400, "invalid"), Exists("there", 412, "exists"), DeadlineExceeded("late")]
)
def test_what_would_fail_again_is_not_tried_again(error: ClientError) -> None:
    with pytest.raises(type(error)):
        attempts(_Clock()).pause(error)


def test_damage_is_asked_for_again_once() -> None:
    made = attempts(_Clock())
    made.pause(WrongDigest("flipped"))
    with pytest.raises(WrongDigest):
        made.pause(WrongDigest("flipped"))


def test_retry_after_is_waited_for_unless_the_deadline_is_before_it() -> None:
    clock = _Clock()
    assert attempts(clock).pause(Busy("full", 503, "busy", 2.0)) == pytest.approx(2.05)
    late = attempts(clock)
    clock.now += 4.0
    with pytest.raises(Busy):
        late.pause(Busy("full", 503, "busy", 2.0))


def test_no_time_left_is_an_error_of_its_own() -> None:
    clock = _Clock()
    made = attempts(clock)
    assert made.remaining() == pytest.approx(5.0)
    clock.now += 5.0
    with pytest.raises(DeadlineExceeded, match=r"5\.0 s"):
        made.remaining()


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="attempts = 0"):
        ClientOptions(attempts=0)
    with pytest.raises(ConfigError, match="'fast'"):
        ClientOptions(data="fast")  # type: ignore[arg-type]


def test_statuses_have_their_classes() -> None:
    error = refused("wait", 503, "busy", 1.5)
    assert (type(error), error.status, error.code, error.retry_after) == (Busy, 503, "busy", 1.5)
    assert type(refused("?", 418, "teapot")).__name__ == "Refused"


# ---- through httpx


def call(*, idempotent: bool = True) -> Call[memoryview]:
    return Call("PUT", "/v1/thing", Inbox, body=[b"abc", b"de"], idempotent=idempotent)


def caller(handler: Callable[[httpx.Request], httpx.Response], **options: float) -> HttpCaller:
    chosen = ClientOptions(**{"timeout": 2.0, "backoff": 1e-4, "breaker_failures": 100} | options)  # type: ignore[arg-type]
    return HttpCaller(Session("http://there", "secret", chosen, None), httpx.MockTransport(handler))


def answer(status: int, body: bytes, **headers: str) -> httpx.Response:
    # As from a socket: `content` would count as read already.
    return httpx.Response(status, stream=httpx.ByteStream(body), headers=headers)


def busy(after: str | None = None) -> httpx.Response:
    body = json.dumps({"error": {"code": "busy", "message": "full"}}).encode()
    return answer(503, body, **({} if after is None else {"Retry-After": after}))


def test_a_call_is_whole_at_each_attempt_and_carries_token_and_length() -> None:
    bodies: list[bytes] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(request.read())
        assert request.headers["Authorization"] == "Bearer secret"
        assert request.headers["Content-Length"] == "5"
        assert "Transfer-Encoding" not in request.headers
        if len(bodies) == 1:
            raise httpx.ReadError("gone")
        return busy() if len(bodies) == 2 else answer(200, b"done")

    assert caller(handler).run(call()) == b"done"
    assert bodies == [b"abcde"] * 3


def test_a_call_that_is_not_idempotent_is_made_once() -> None:
    seen: list[int] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(1)
        return busy("0")

    with pytest.raises(Busy) as caught:
        caller(handler).run(call(idempotent=False))
    assert (len(seen), caught.value.code, caught.value.retry_after, str(caught.value)) == (1, "busy", 0.0, "full")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (httpx.ConnectError("refused"), Unreachable),
        (httpx.ReadTimeout("late"), DeadlineExceeded),
        (httpx.RemoteProtocolError("half"), Interrupted),
    ],
)
def test_errors_of_the_connection_are_those_of_the_tree(raised: Exception, expected: type[ClientError]) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise raised

    with pytest.raises(expected, match="http://there"):
        caller(handler).run(call())


def test_an_address_that_does_not_answer_is_left_alone_and_tried_again_after_the_pause() -> None:
    answers, seen = [False], []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(1)
        if not answers[0]:
            raise httpx.ConnectError("refused")
        return answer(200, b"up")

    client = caller(handler, attempts=1, breaker_failures=2, breaker_pause=3600.0)
    for _ in range(5):
        with pytest.raises(Unreachable):
            client.run(call())
    assert len(seen) == 2
    answers[0] = True
    with pytest.raises(Unreachable, match=r"left alone for a while; the last time: .*refused"):
        client.run(call())
    client.line.breaker._next_trial = 0.0  # the pause is over
    assert client.run(call()) == b"up"
    assert not client.line.breaker.is_open


def test_refusals_do_not_open_the_breaker() -> None:
    client = caller(lambda request: busy("0"), attempts=1, breaker_failures=1)
    for _ in range(3):
        with pytest.raises(Busy):
            client.run(call())
    assert not client.line.breaker.is_open
