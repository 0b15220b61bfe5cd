"""A removal that a tier did not do is a refusal on every port, and nothing is listed or counted as gone."""

from collections.abc import Callable, Iterator, Sequence

import pytest
from client_world import Service, serving

from kvtier.client import Block, Client, ClientOptions
from kvtier.client.data import DataClient
from kvtier.client.errors import Busy, Refused, ServerTimeout
from kvtier.service.cache import LOCAL
from kvtier.service.run import _flushed
from kvtier.store import TieredStore, build
from kvtier.testing import Fault, FaultyTier, Kind
from kvtier.tiers import Tier

KEY = bytes(range(16))
PATH = f"/v1/namespaces/blocks/blocks/{KEY.hex()}"
CALLS: dict[str, tuple[str, str, dict[str, object] | None]] = {
    "delete": ("DELETE", PATH, None),
    "delete many": ("POST", "/v1/namespaces/blocks/blocks:delete", {"keys": [KEY.hex()]}),
    "clear": ("POST", "/v1/namespaces/blocks:clear", None),
    "drop": ("DELETE", "/v1/namespaces/blocks", None),
}
REMOVALS = (Fault("remove", Kind.UNAVAILABLE), Fault("clear", Kind.UNAVAILABLE))
LATE_REMOVALS = (Fault("remove", Kind.TIMEOUT), Fault("clear", Kind.TIMEOUT))


@pytest.fixture
def service(tmp_path, monkeypatch) -> Iterator[Service]:
    monkeypatch.setattr(build, "TieredStore", lambda host, lower, **more: TieredStore(host, _faulty(lower), **more))
    with serving(tmp_path, nvme=True) as service:
        assert service.rest.http.post("/v1/namespaces", json={"name": "blocks"}).status_code == 201
        yield service


@pytest.fixture
def below(service: Service) -> FaultyTier:
    """What is below host fails as it is told to; it has one block."""
    assert service.rest.http.put(PATH, content=b"secret" * 100).status_code == 201
    service.cache.flush()
    (tier,) = service.cache._tenants["default"].store.lower
    return tier


def _faulty(lower: Sequence[Tier]) -> list[FaultyTier]:
    return [FaultyTier(tier) for tier in lower]


def _found(service: Service) -> int:
    return service.rest.http.get(PATH).status_code


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize(
    ("faults", "status", "code"), [(REMOVALS, 503, "unavailable"), (LATE_REMOVALS, 504, "timeout")]
)
def test_rest_says_that_blocks_remain(
    service: Service, below: FaultyTier, verb: str, faults: tuple[Fault, ...], status: int, code: str
) -> None:
    method, path, body = CALLS[verb]
    before = service.rest.http.get("/v1/namespaces").json()
    below.inject(*faults)
    answer = service.rest.http.request(method, path, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "blocks remain in nvme" in answer.json()["error"]["message"]
    assert ("Retry-After" in answer.headers) == (status == 503)
    # It is found again, so the namespace must be there, too, also after a restart.
    after = service.rest.http.get("/v1/namespaces").json()
    assert [one["name"] for one in after["namespaces"]] == [one["name"] for one in before["namespaces"]] == ["blocks"]
    assert service.cache._state.load("default").namespaces.keys() == {"blocks"}
    assert _found(service) == 200
    below.heal()
    assert service.rest.http.request(method, path, json=body).status_code in (200, 204)
    if verb == "drop":
        assert service.rest.http.get("/v1/namespaces").json() == {"namespaces": []}
        assert service.rest.http.post("/v1/namespaces", json={"name": "blocks"}).status_code == 201
    assert _found(service) == 404


@pytest.mark.parametrize(("faults", "error"), [(REMOVALS, Busy), (LATE_REMOVALS, ServerTimeout)])
def test_clients_raise(service: Service, below: FaultyTier, faults: tuple[Fault, ...], error: type[Refused]) -> None:
    with Client(service.url, options=ClientOptions(attempts=1)) as rest, DataClient(service.data_address) as data:
        verbs: list[Callable[[], object]] = [
            lambda: data.delete("blocks", [KEY]),
            lambda: rest.delete("blocks", [KEY]),
            lambda: rest.clear_namespace("blocks"),
            lambda: rest.drop_namespace("blocks"),
        ]
        below.inject(*faults)
        for verb in verbs:
            with pytest.raises(error, match="blocks remain in nvme"):
                verb()
        below.heal()
        data.delete("blocks", [KEY])
        assert data.get("blocks", KEY) is None
        assert rest.put("blocks", Block(KEY, b"again")) == "stored"


def test_a_namespace_that_is_being_dropped_takes_no_calls(service: Service, below: FaultyTier) -> None:
    tenant = service.cache._tenants["default"]
    seen: list[object] = []
    clear = tenant.store.clear

    def spying(*arguments: object, **named: object) -> None:
        seen.append(service.rest.http.put(PATH, content=b"late").status_code)
        clear(*arguments, **named)

    tenant.store.clear = spying
    assert service.rest.http.delete("/v1/namespaces/blocks").status_code == 204
    assert seen == [404]


def test_blocks_that_no_lower_tier_took_are_left_behind(
    service: Service, below: FaultyTier, caplog: pytest.LogCaptureFixture
) -> None:
    assert _flushed(service.cache)
    below.inject(Fault("write", Kind.UNAVAILABLE))
    other = PATH[:-2] + "ff"
    assert service.rest.http.put(other, content=b"acknowledged").status_code == 201
    assert not _flushed(service.cache)
    (record,) = [one for one in caplog.records if one.message == "what no lower tier took is lost"]
    assert (record.waiting_bytes, record.refused_blocks) == (0, 1)
    below.heal()
    service.cache.delete(LOCAL, "blocks", [bytes.fromhex(other[-32:])])
    assert _flushed(service.cache)
