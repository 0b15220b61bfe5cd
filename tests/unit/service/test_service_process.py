"""The service as a process: what it refuses to start with, and how signals end it."""

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import trustme
from cache_world import OPAQUE, blocks, chain, config_of, data, open_cache
from patience import PATIENCE, until

from kvtier.cli import main
from kvtier.config import load_config
from kvtier.errors import ConfigError
from kvtier.http.listening import listen
from kvtier.service.cache import LOCAL, Cache, Scope, Tokens
from kvtier.service.data import DataServer
from kvtier.service.exposure import check_exposure
from kvtier.service.run import CacheServer

# ---- refusals


def check(**settings) -> None:
    check_exposure(load_config({"service": settings}, environ={}, search=False).config.service)


@pytest.fixture
def pem(tmp_path):
    path = tmp_path / "any.pem"
    path.write_text("")
    return path


def test_on_loopback_nothing_is_needed():
    for host in ("127.0.0.1", "::1", "127.1.2.3"):
        check(host=host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_off_loopback_tokens_and_tls_are_needed(host, tmp_path, authority):
    files = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    tokens = tmp_path / "tokens.json"
    with pytest.raises(ConfigError, match=r"service\.tokens is none.*kvtier cache token create"):
        check(host=host)
    with pytest.raises(ConfigError, match=r"service\.tokens is none"):
        check(host=host, **files, allow_plaintext=True)
    with pytest.raises(ConfigError, match=r"there is no TLS.*service\.allow_plaintext"):
        check(host=host, tokens=tokens)
    check(host=host, tokens=tokens, allow_plaintext=True)
    check(host=host, tokens=tokens, **files)


def test_what_cannot_work_is_refused(tmp_path, pem):
    with pytest.raises(ConfigError, match="no such file"):
        check(tls_cert=tmp_path / "none.pem", tls_key=pem)
    with pytest.raises(ConfigError, match=r"service\.tls_cert = .*any\.pem.*without a passphrase"):
        check(tls_cert=pem, tls_key=pem)
    with pytest.raises(ConfigError, match="which tenant a caller is of"):
        check(tenants=pem)
    with pytest.raises(ConfigError, match="name an address of this machine"):
        check(host="no.such.host.invalid")


def test_the_command_says_what_to_do(capsys):
    assert main(["cache", "serve", "--host", "0.0.0.0"]) == 2
    assert "make a token with `kvtier cache token create`" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["cache", "serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "service.port" in capsys.readouterr().err


# ---- a process

_COMMAND = "import sys; from kvtier.cli import main; sys.exit(main())"
_LARGE = 8 << 20


class Service:
    """`kvtier cache serve` until it is ended."""

    def __init__(
        self, tmp: Path, context: ssl.SSLContext | None = None, *, before: str = "", **settings: object
    ) -> None:
        rows = {"state": str(tmp / "state"), "port": 0, "data_port": "none", "drain_timeout": 60.0, **settings}
        config = tmp / "kvtier.toml"
        nvme = {"path": str(tmp / "nvme"), "capacity": "64MiB", "segment_size": "16MiB", "min_free": 0}
        sections = {"tiering.host": {"capacity": "64MiB"}, "tiering.nvme": nvme, "service": rows}
        sections["log"] = {"format": "json"}
        config.write_text(
            "\n".join(
                "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())])
                for name, values in sections.items()
            )
        )
        self._context = context
        self.lines: list[dict[str, object]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", before + _COMMAND, "--config", str(config), "cache", "serve"],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            until(lambda: self.said("listening") or self.process.poll() is not None)
            assert self.process.poll() is None, self.lines
        except BaseException:
            self.end()
            raise
        url = str(next(line["url"] for line in self.lines if line["message"] == "listening"))
        self.port = int(url.split(":")[2].split("/", maxsplit=1)[0])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(json.loads(line) if line.startswith("{") else {"message": line})

    def said(self, message: str) -> bool:
        return any(message in str(line["message"]) for line in self.lines)

    def connection(self) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=PATIENCE, context=self._context)

    def call(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        connection = self.connection()
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def slow_get(self, path: str, **headers: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A GET whose body nobody reads yet: more than the sockets' buffers hold."""
        connection = self.connection()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(PATIENCE)
        sock.connect(("127.0.0.1", self.port))
        connection.sock = (
            sock if self._context is None else self._context.wrap_socket(sock, server_hostname="127.0.0.1")
        )
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        assert response.status == 200
        return connection, response

    def ended(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def end(self) -> None:
        self.process.kill()
        self.process.wait(20)
        self._reader.join(PATIENCE)


def block_path(key: bytes) -> str:
    return f"/v1/namespaces/blocks/blocks/{key.hex()}"


def test_sigterm_lets_what_runs_end_and_flushes(tmp_path):
    (key,) = chain(1)
    service = Service(tmp_path)
    try:
        spec = json.dumps({"name": "blocks", "layout": None}).encode()
        assert service.call("POST", "/v1/namespaces", spec, Content_Type="application/json")[0] == 201
        assert service.call("PUT", block_path(key), data(key, _LARGE))[0] == 201
        connection, response = service.slow_get(block_path(key))
        service.process.send_signal(signal.SIGTERM)
        until(lambda: service.said("draining"))
        until(lambda: service.call("GET", "/readyz")[0] == 503)
        status, body = service.call("GET", block_path(key))
        assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
        assert service.call("GET", "/healthz")[0] == 200
        assert response.read() == data(key, _LARGE)
        connection.close()
        assert service.ended() == 0
    finally:
        service.end()
    assert [line["message"] for line in service.lines if line.get("logger") == "kvtier.audit"] == ["drain", "flush"]
    row = next(line for line in service.lines if line["message"] == "request")
    assert str(row["request_id"]).startswith("req-")
    assert row["token"] == "local"
    opened = open_cache(tmp_path)
    assert opened.match(LOCAL, "blocks", [key]) == ("nvme",)
    opened.close()


def test_a_call_that_a_tier_holds_up_does_not_keep_the_process(tmp_path):
    held = (
        "import sys, time; from kvtier.service.cache.tenant import Tenant; "
        "Tenant.clear = lambda *_: (print('it hangs', file=sys.stderr, flush=True), time.sleep(1000)); "
    )
    service = Service(tmp_path, before=held, drain_timeout=0.3)
    try:
        assert service.call("POST", "/v1/namespaces", b'{"name": "blocks"}', Content_Type="application/json")[0] == 201
        connection = service.connection()
        connection.request("POST", "/v1/namespaces/blocks:clear")
        until(lambda: service.said("it hangs"))
        service.process.send_signal(signal.SIGTERM)
        assert service.ended() == 1
        assert service.said("drain_timeout is over")
        connection.close()
    finally:
        service.end()


def test_what_does_not_end_in_time_is_counted_as_left_behind():
    config = config_of(service={"data_port": None, "drain_timeout": 0.2})
    cache, tokens = Cache.open(config.service, config.tiering), Tokens.open(None)
    try:
        cache.create_namespace(LOCAL, OPAQUE)
        server = CacheServer(cache, tokens, config.service, DataServer(cache, tokens, config.service))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listen("127.0.0.1", 0)]}, daemon=True)
        thread.start()
        until(lambda: server.started)
        reading = cache.read(LOCAL, "blocks", chain(1), owner="slow").result(10)
        server.handle_exit(signal.SIGTERM, None)
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert (server.left, cache.draining, reading.closed) == (1, True, False)
    finally:
        cache.close()
    assert reading.closed


@pytest.fixture
def authority(tmp_path):
    made = trustme.CA()
    certificate = made.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    return made


def test_who_does_not_agree_on_tls_is_left(tmp_path, authority):
    files = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    config = config_of(service={"data_port": None, "idle_timeout": 0.3, **files})
    cache, tokens = Cache.open(config.service, config.tiering), Tokens.open(None)
    try:
        server = CacheServer(cache, tokens, config.service, DataServer(cache, tokens, config.service))
        taken = listen("127.0.0.1", 0)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, daemon=True)
        thread.start()
        until(lambda: server.started)
        for sent in (b"", b"\x16\x03\x01\x02\x00\x01"):
            with socket.create_connection(taken.getsockname(), timeout=10) as line:
                line.sendall(sent)
                assert line.recv(100) == b""
        server.handle_exit(signal.SIGTERM, None)
        thread.join(PATIENCE)
        assert not thread.is_alive()
    finally:
        cache.close()


def test_a_hangup_before_it_is_ready_ends_nothing(tmp_path):
    config = tmp_path / "kvtier.toml"
    config.write_text('[tiering.host]\ncapacity = "1MiB"\n[service]\nport = 0\ndata_port = "none"\n')
    hangup = (
        "import os, signal, kvtier.server as s; checked = s.require_server; "
        "s.require_server = lambda: (checked(), os.kill(os.getpid(), signal.SIGHUP)); "
    )
    process = subprocess.Popen(
        [sys.executable, "-c", hangup + _COMMAND, "--config", str(config), "cache", "serve"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert any("listening" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait(10)


def test_tls_tokens_sighup_and_the_second_signal(tmp_path, authority):
    (key,) = chain(1)
    before = open_cache(tmp_path, {"max_block": _LARGE}, host={"capacity": 2 * _LARGE}, nvme={"capacity": "64MiB"})
    before.create_namespace(LOCAL, OPAQUE)
    before.put(LOCAL, "blocks", blocks([key], _LARGE)).result(10)
    before.flush()
    before.close()
    tokens = Tokens.open(tmp_path / "tokens.json")
    secret = tokens.create("default", [Scope.READ])
    context = ssl.create_default_context()
    authority.configure_trust(context)
    files = {"tokens": "tokens.json", "tls_cert": "cert.pem", "tls_key": "key.pem"}
    service = Service(tmp_path, context, **{name: str(tmp_path / file) for name, file in files.items()})
    try:
        assert service.call("GET", block_path(key))[0] == 401
        assert service.call("GET", block_path(key), Authorization=f"Bearer {secret}") == (200, data(key, _LARGE))
        tokens.revoke(secret.split("_")[1])
        other = tokens.create("default", [Scope.READ])
        service.process.send_signal(signal.SIGHUP)
        until(lambda: service.said("read the tokens again"))
        assert service.call("GET", block_path(key), Authorization=f"Bearer {secret}")[0] == 401
        (tmp_path / "tokens.json").write_text("damaged")
        service.process.send_signal(signal.SIGHUP)
        until(lambda: service.said("tokens stay as they were"))
        connection, _ = service.slow_get(block_path(key), Authorization=f"Bearer {other}")
        service.process.send_signal(signal.SIGTERM)
        until(lambda: service.said("draining"))
        service.process.send_signal(signal.SIGTERM)
        assert service.ended() == 1
        connection.close()
        assert service.said("stopped at once")
        assert not any(one.split("_")[2] in json.dumps(service.lines) for one in (secret, other))
    finally:
        service.end()
