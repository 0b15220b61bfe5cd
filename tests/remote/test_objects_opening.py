"""From settings to an open object store, and what is refused."""

import contextlib
import socket
import threading
import time
from pathlib import Path

import pytest
from objects_world import objects_in

from kvtier.config.remote import RemoteSettings
from kvtier.errors import ConfigError, TierUnavailable
from kvtier.metrics import Metrics
from kvtier.remote import open_remote
from kvtier.testing.blocks import chain_refs, load, put
from kvtier.tiers import Status

NOWHERE = "endpoint=http://127.0.0.1:9,allow_http=true,region=x,access_key_id=a,secret_access_key=b"


def test_what_settings_make(tmp_path: Path) -> None:
    settings = RemoteSettings(url=(tmp_path / "new").as_uri(), options=" run = 2 ,", prefix="team/kv:")
    with contextlib.closing(open_remote(settings)) as tier:
        assert tier.caps.run == 2
        assert tier.caps.durable
        assert tier.caps.shared
        assert tier.caps.remote
        put(tier, chain_refs(2), 100)
        assert [path.partition("/r2/")[0] for path in objects_in(tier)] == ["team/kv"]
    with contextlib.closing(open_remote(RemoteSettings(url="memory:///"))) as tier:
        assert tier.caps.run == 8
        assert not tier.caps.durable


@pytest.mark.parametrize(
    ("url", "options", "store"),
    [
        (
            "s3://bucket/team/kv",
            "region=x,access_key_id=a,secret_access_key=b",
            'S3Store(bucket="bucket", prefix="team/kv")',
        ),
        ("gs://bucket/team/kv", "", 'GCSStore(bucket="bucket", prefix="team/kv")'),
        (
            "az://container/team/kv",
            "account_name=acct,account_key=Zm9v",
            'AzureStore(container_name="container", account_name="acct", prefix="team/kv")',
        ),
    ],
)
def test_every_documented_store_opens_without_a_network(url: str, options: str, store: str) -> None:
    with contextlib.closing(open_remote(RemoteSettings(url=url, options=options, timeout=0.1))) as tier:
        assert repr(tier._backend._store) == store
        assert tier.name == "remote"


def test_what_is_in_a_directory_outlives_the_process(tmp_path: Path) -> None:
    settings = RemoteSettings(url=tmp_path.as_uri(), options="run=2")
    with contextlib.closing(open_remote(settings)) as tier:
        put(tier, chain_refs(4), 100)
    with contextlib.closing(open_remote(settings)) as tier:
        assert [status for status, _ in load(tier, [ref.key for ref in chain_refs(4)])] == [Status.OK] * 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": "run=0"}, "run=0: expected 1 to 256"),
        ({"options": "run=many"}, "run=many: expected 1 to 256"),
        ({"options": "run"}, "'run' is no option"),
        ({"options": "=3"}, "'=3' is no option"),
        ({"options": "colour=red"}, "the only option is run; remove colour"),
        ({"ttl": 60}, "ttl = 60: objects do not expire"),
        ({"username": "me"}, "username is set"),
        ({"token_file": "token"}, "token_file is set"),
        ({"prefix": "../up"}, r"prefix = '\.\./up': it names a folder"),
        ({"prefix": "a b"}, "prefix = 'a b'"),
        ({"prefix": "/"}, "prefix = '/'"),
        ({"url": "file:///dev/null/x"}, "cannot be opened"),
        ({"url": "s3://bucket/x", "options": "region=x,hue=2"}, "cannot be opened: .*hue"),
        ({"url": "s3://bucket/x", "options": "region=x,endpoint=http://h:9"}, "http://h:9 has no TLS: add allow_http"),
        ({"url": "az://account/container/x", "options": "account_key=Zm9v"}, "set .*account_name=NAME"),
        ({"url": "ftp://host/x"}, "unknown scheme 'ftp'"),
        ({"url": "s3://key:secret@bucket"}, "holds a user name or password"),
    ],
)
def test_what_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_remote(RemoteSettings(**{"url": "memory:///"} | settings))


def test_closed_while_a_call_hangs() -> None:
    failed: list[BaseException] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = f"run=4,{NOWHERE}".replace(":9,", f":{silent.getsockname()[1]},")
        tier = open_remote(RemoteSettings(url="s3://bucket/x", options=options, timeout=30))

        def ask() -> None:
            try:
                tier.acquire([ref.key for ref in chain_refs(4)], "reader")
            except TierUnavailable as error:
                failed.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        connection = silent.accept()[0]
        tier.close()
        thread.join(10)
        assert not thread.is_alive()
        connection.close()
    assert "is closed" in str(failed[0])


def test_a_call_that_hangs_is_over_at_its_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = f"run=4,{NOWHERE}".replace(":9,", f":{silent.getsockname()[1]},")
        with contextlib.closing(open_remote(RemoteSettings(url="s3://bucket/x", options=options, timeout=30))) as tier:
            start = time.monotonic()
            done = tier.acquire([ref.key for ref in chain_refs(4)], "reader", start + 0.2).wait(0)
            assert done.statuses == (Status.TIMEOUT,) * 4
            assert time.monotonic() - start < 20


def test_a_store_that_nobody_answers_for() -> None:
    metrics = Metrics()
    refs = chain_refs(4)
    settings = RemoteSettings(url="s3://bucket/x", options=f"run=4,{NOWHERE}", timeout=1)
    with contextlib.closing(open_remote(settings, metrics)) as tier:
        start = time.monotonic()
        for _ in range(3):
            with pytest.raises(TierUnavailable, match=r"s3://bucket/x (cannot be reached|could not be reached)"):
                tier.acquire([ref.key for ref in refs], "reader")
            with pytest.raises(TierUnavailable):
                tier.reserve(refs, [10] * 4, ["raw"] * 4, "writer")
        assert time.monotonic() - start < 30
        assert metrics.value("remote_outcomes_total", tier="remote", reason="refused") == 6
        assert tier.stats()["leases"] == tier.stats()["reservations"] == 0
    with pytest.raises(TierUnavailable, match="closed"):
        tier.acquire([refs[0].key], "reader")
    tier.close()
