"""A service with TLS and tokens, in a process of its own: REST, data port and a tier on it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from client_world import LAYOUT, blocks
from daemon_world import Daemon, nursery

from kvtier.client import Client, ClientOptions
from kvtier.client.errors import Unauthorized, Unreachable
from kvtier.config import RemoteSettings
from kvtier.errors import TierUnavailable
from kvtier.remote import open_remote
from kvtier.service.cache import Scope, Tokens
from kvtier.testing.blocks import chain_refs, load, put
from kvtier.tiers import Status


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def secret(path: Path) -> str:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(path / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_pem.write_to_path(path / "key.pem")
    (path / "cert.pem").write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
    secret = Tokens.open(path / "tokens").create("default", [Scope.READ, Scope.WRITE])
    (path / "token").write_text(secret)
    return secret


@pytest.fixture(scope="module")
def daemon(path: Path, secret: str) -> Iterator[Daemon]:
    files = {"tls_cert": str(path / "cert.pem"), "tls_key": str(path / "key.pem"), "tokens": str(path / "tokens")}
    with nursery() as daemons:
        yield Daemon(daemons, path / "daemon", socket=None, **files)


def test_blocks_travel_over_tls(daemon: Daemon, path: Path, secret: str) -> None:
    chain = blocks(4)
    for data, way in (("auto", "data"), ("never", "rest")):
        options = ClientOptions(ca_file=path / "ca.pem", data=data)
        with Client(daemon.url, token=secret, options=options) as client:
            client.create_namespace("n", LAYOUT)
            client.put_many("n", chain)
            found = client.get_many("n", [block.key for block in chain])
            assert [bytes(one.data) for one in found] == [block.data for block in chain]
            assert client.way == way


def test_who_does_not_know_the_authority_does_not_connect(daemon: Daemon, secret: str) -> None:
    with Client(daemon.url, token=secret, options=ClientOptions(attempts=1)) as client, pytest.raises(Unreachable):
        client.namespaces()


def test_a_wrong_token_opens_nothing(daemon: Daemon, path: Path, secret: str) -> None:
    options = ClientOptions(ca_file=path / "ca.pem")
    wrong = secret[:-4] + ("AAAA" if not secret.endswith("AAAA") else "BBBB")
    with Client(daemon.url, token=wrong, options=options) as client:
        with pytest.raises(Unauthorized):
            client.namespaces()
        with pytest.raises(Unauthorized):
            client.get("n", b"k" * 16)


def test_a_tier_over_tls(daemon: Daemon, path: Path) -> None:
    refs = chain_refs(3)
    url = f"kvtiers://{daemon.address}"
    settings = RemoteSettings(url=url, ca_file=path / "ca.pem", token_file=path / "token")
    with contextlib.closing(open_remote(settings)) as tier:
        put(tier, refs, 4096)
        assert [status for status, _ in load(tier, [ref.key for ref in refs])] == [Status.OK] * 3
    with pytest.raises(TierUnavailable, match="refuses"):
        open_remote(RemoteSettings(url=url, ca_file=path / "ca.pem"))
