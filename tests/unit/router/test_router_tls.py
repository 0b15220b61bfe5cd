"""TLS of the router: towards clients, towards engines, and where it does not start without."""

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import uvicorn
from cryptography.hazmat.primitives import serialization
from patience import until
from router_world import RunningRouter, serving
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from kvtier.cli import main
from kvtier.config import RouterSettings
from kvtier.errors import ConfigError
from kvtier.http.exposure import check_tls
from kvtier.router.app import Router
from kvtier.router.fleet import Address


class Authority:
    """A certificate authority and what it signed, as files."""

    def __init__(self, place: Path) -> None:
        place.mkdir()
        made = trustme.CA()
        certificate = made.issue_cert("127.0.0.1")
        self.ca, self.cert, self.key = place / "ca.pem", place / "cert.pem", place / "key.pem"
        made.cert_pem.write_to_path(self.ca)
        certificate.cert_chain_pems[0].write_to_path(self.cert)
        certificate.private_key_pem.write_to_path(self.key)
        self.files = {"tls_cert": self.cert, "tls_key": self.key}
        self.context = ssl.create_default_context(cafile=self.ca)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs")


@pytest.fixture(scope="module")
def engine(theirs: Authority) -> Iterator[str]:
    """One that speaks nothing but HTTPS; its URL."""
    routes = [
        Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "m"}]})),
        Route("/v1/completions", lambda _: JSONResponse({"from": "https"}), methods=["POST"]),
        Route("/{path:path}", lambda _: JSONResponse({}), methods=["GET", "POST"]),
    ]
    config = uvicorn.Config(
        Starlette(routes=routes),
        log_level="critical",
        lifespan="off",
        timeout_graceful_shutdown=1,
        ssl_certfile=theirs.cert,
        ssl_keyfile=theirs.key,
    )
    server = uvicorn.Server(config)
    with serving(server) as (host, port):
        yield f"https://{host}:{port}"
        server.should_exit = True


def test_clients_and_engines_are_spoken_to_over_tls(engine: str, ours: Authority, theirs: Authority) -> None:
    router = RunningRouter([Address(engine)], ca_file=theirs.ca, **ours.files)
    try:
        assert router.url.startswith("https://")
        until(lambda: router.fleet.engines[0].up)
        with httpx.Client(base_url=router.url, verify=ours.context, trust_env=False) as client:
            answer = client.post("/v1/completions", json={"prompt": "a"})
            assert (answer.status_code, answer.json()) == (200, {"from": "https"})
            assert answer.headers["x-kvtier-engine"] == engine.removeprefix("https://")
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(router.url + "/healthz", verify=theirs.context, trust_env=False)
        with pytest.raises(httpx.HTTPError):
            httpx.get(router.url.replace("https", "http") + "/healthz", trust_env=False)
    finally:
        router.stop()


def test_an_engine_that_nobody_vouches_for_is_down(engine: str, ours: Authority) -> None:
    for settings in ({}, {"ca_file": ours.ca}):
        router = RunningRouter([Address(engine)], **settings)
        try:
            assert not router.fleet.engines[0].up
            assert router.http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        finally:
            router.stop()


def check(**settings: Any) -> None:
    check_tls(RouterSettings(**settings), "router", "prompts")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_off_loopback_tls_is_needed(host: str, ours: Authority) -> None:
    with pytest.raises(ConfigError, match=r"read prompts; set router\.tls_cert .*router\.allow_plaintext"):
        check(host=host)
    check(host=host, allow_plaintext=True)
    check(host=host, **ours.files)


def test_on_loopback_nothing_is_needed() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        check(host=host)


def test_files_that_are_no_certificates_are_refused(tmp_path: Path, ours: Authority, theirs: Authority) -> None:
    with pytest.raises(ConfigError, match=r"router\.tls_cert = .*none: no such file"):
        check(tls_cert=tmp_path / "none", tls_key=ours.key)
    with pytest.raises(ConfigError, match="a PEM certificate and its key"):
        check(tls_cert=ours.cert, tls_key=theirs.key)
    for path in (ours.key, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"router\.ca_file = .*expected certificates as PEM"):
            Router([Address("https://127.0.0.1:9")], RouterSettings(ca_file=path))


def test_a_key_with_a_passphrase_is_refused_and_not_asked_for(tmp_path: Path, ours: Authority) -> None:
    private = serialization.load_pem_private_key(ours.key.read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    locked = tmp_path / "locked.pem"
    locked.write_bytes(private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    with pytest.raises(ConfigError, match="without a passphrase"):
        check(tls_cert=ours.cert, tls_key=locked)


def test_the_command_refuses_before_it_listens(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.delenv("KVTIER_CONFIG", raising=False)
    assert main(["router", "--engine", "http://a", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "set router.tls_cert and router.tls_key" in capsys.readouterr().err
    monkeypatch.setenv("KVTIER_ROUTER__TLS_CERT", "/some.pem")
    assert main(["router", "--engine", "http://a", "--port", "0"]) == 2
    assert "a certificate and its key belong together" in capsys.readouterr().err
