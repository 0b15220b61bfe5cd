"""A cache service as a tier passes the public suite, over TCP and over its Unix socket."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_world import Service, serving

from kvtier.config.remote import RemoteSettings
from kvtier.errors import ConfigError, TierUnavailable
from kvtier.metrics import Metrics
from kvtier.remote import RemoteTier, open_remote
from kvtier.service.cache import Scope, Tokens
from kvtier.testing import OpenTierSuite
from kvtier.testing.blocks import chain_refs, load, put
from kvtier.tiers import Status, Tier


class TestPeerTier(OpenTierSuite):
    bounded = False
    eager_closure = False

    @pytest.fixture(scope="class")
    @classmethod
    def service(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
        with serving(tmp_path_factory.mktemp("peer"), host="64MiB") as service:
            yield service

    @pytest.fixture(autouse=True)
    def _empty(self, service: Service) -> None:
        self._service = service
        service.forget()

    def url(self) -> str:
        return f"kvtier://{self._service.data_address}"

    def make_tier(self, capacity_bytes: int, metrics: Metrics) -> RemoteTier:
        return open_remote(RemoteSettings(url=self.url(), absent_ttl=0, timeout=5), metrics)

    def corrupt(self, tier: Tier, key: bytes) -> None:
        self._service.damage(key)


class TestPeerOverItsSocket(TestPeerTier):
    def url(self) -> str:
        return f"kvtier://{self._service.socket}"


@pytest.fixture(scope="module")
def shut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, str]]:
    """A service that wants tokens, and one of them."""
    path = tmp_path_factory.mktemp("shut")
    secret = Tokens.open(path / "tokens").create("default", [Scope.READ, Scope.WRITE])
    with serving(path, tokens=path / "tokens") as service:
        yield service, secret


def test_a_token_in_a_file_opens_it(shut: tuple[Service, str], tmp_path: Path) -> None:
    service, secret = shut
    (tmp_path / "token").write_text(f"{secret}\n")
    refs = chain_refs(3)
    tier = open_remote(RemoteSettings(url=f"kvtier://{service.data_address}", token_file=tmp_path / "token"))
    with contextlib.closing(tier):
        put(tier, refs, 4096)
        assert {key for keys in tier.listed(refs[0].ns) for key in keys} == {ref.key for ref in refs}
        tier.clear()
        assert [status for status, _ in load(tier, [ref.key for ref in refs])] == [Status.MISS] * 3


def test_a_service_that_refuses_is_told_at_once_and_one_that_is_not_there_may_come(
    shut: tuple[Service, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, secret = shut
    url = f"kvtier://{service.data_address}"
    with pytest.raises(TierUnavailable, match=r"refuses: no valid token; tiering\.remote\.token_file"):
        open_remote(RemoteSettings(url=url))
    monkeypatch.setenv("KVTIER_TEST_TOKEN", secret)
    open_remote(RemoteSettings(url=url, password_variable="KVTIER_TEST_TOKEN")).close()
    open_remote(RemoteSettings(url="kvtier:///nowhere.sock")).close()


def test_prefixes_are_worlds_of_their_own(tmp_path: Path) -> None:
    refs = chain_refs(3)
    with serving(tmp_path) as service:
        one, two = (
            open_remote(RemoteSettings(url=f"kvtier://{service.data_address}", prefix=prefix)) for prefix in ("a", "b")
        )
        with contextlib.closing(one), contextlib.closing(two):
            put(one, refs, 4096)
            assert [status for status, _ in load(one, [ref.key for ref in refs])] == [Status.OK] * 3
            assert [status for status, _ in load(two, [ref.key for ref in refs])] == [Status.MISS] * 3


@pytest.mark.parametrize(
    ("url", "more", "what"),
    [
        ("kvtier://", {}, "kvtier://host:port"),
        ("kvtier://host:99999", {}, "host:port"),
        ("kvtier://host/path", {}, "host:port"),
        ("kvtier://host", {"ttl": 5}, "ttl"),
        ("kvtier://host", {"token_file": "/nowhere/token"}, "token_file"),
        ("kvtiers://host", {"ca_file": "/nowhere/ca"}, "ca_file"),
    ],
)
def test_settings_that_do_not_do(url: str, more: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        open_remote(RemoteSettings(url=url, **more))
