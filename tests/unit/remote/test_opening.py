"""From settings to a remote tier: what is refused before anything is opened, and what a tier is opened as."""

import logging
from pathlib import Path

import pytest

from kvtier.config import HostSettings, NvmeSettings, RemoteSettings, TieringSettings, load_config
from kvtier.errors import ConfigError
from kvtier.remote import RemoteOptions, open_remote
from kvtier.remote.valkey.node import Address, Login
from kvtier.store.build import open_store

NOBODY = "valkey://127.0.0.1:1"


def refused(url: str = NOBODY, **more: object) -> str:
    with pytest.raises(ConfigError) as error:
        open_remote(RemoteSettings(url=url, **more))
    return str(error.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("memcached://h", "unknown scheme 'memcached'; expected one of valkey,"),
        ("just-a-host", "unknown scheme ''"),
        ("valkey://h:notaport", "expected host:port"),
        ("valkey://:6379", "names no host"),
        ("valkey://[::1", "expected scheme://host:port"),
        ("redis+cluster://[::1],[::2", "expected host:port"),
        ("valkey://h/three", "expected the number of a database"),
        ("valkey://a,b", "several servers are a cluster; write valkey+cluster://"),
        ("redis+cluster://a,b/2", "a cluster has no databases; drop /2"),
    ],
)
def test_an_url_that_does_not_do_is_named(url: str, expected: str) -> None:
    message = refused(url)
    assert expected in message
    assert "tiering.remote.url" in message


@pytest.mark.parametrize("url", ["valkey://me:secret@h", "valkey://me@h"])
def test_secrets_do_not_belong_into_an_url_and_are_not_repeated(url: str) -> None:
    message = refused(url)
    assert "tiering.remote.url holds a user name or password" in message
    assert "secret" not in message


def test_passwords_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cannot be read (No such file or directory)" in refused(password_file=tmp_path / "none")
    (tmp_path / "empty").write_text("\nsecond line")
    assert "is empty or missing" in refused(password_file=tmp_path / "empty")
    monkeypatch.delenv("KVTIER_TEST_PASSWORD", raising=False)
    assert "'KVTIER_TEST_PASSWORD'" in refused(password_variable="KVTIER_TEST_PASSWORD")
    assert "tiering.remote.username without a password" in refused(username="me")


@pytest.mark.parametrize("scheme", ["valkeys", "rediss", "valkeys+cluster", "rediss+cluster"])
def test_certificates_that_do_not_do(tmp_path: Path, scheme: str) -> None:
    url = f"{scheme}://127.0.0.1:1"
    (tmp_path / "junk.pem").write_text("junk")
    assert "cert_file and key_file belong together" in refused(url, cert_file=tmp_path / "junk.pem")
    assert "junk.pem" in refused(url, ca_file=tmp_path / "junk.pem")
    assert "none.pem" in refused(url, ca_file=tmp_path / "none.pem")


def test_a_prefix_has_its_limits() -> None:
    assert "65 bytes: expected at most 64" in refused(prefix="x" * 65)


def test_a_login_does_not_show_its_password() -> None:
    assert "hidden" not in repr(Login("me", "hidden", 0, None))
    assert str(Address("::1", 7)) == "[::1]:7"


def test_a_server_that_is_not_up_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tier = open_remote(RemoteSettings(url=NOBODY, timeout=0.2))
    assert "the remote tier is not there yet: 127.0.0.1:1" in caplog.text
    assert (tier.name, tier.caps.shared, tier.caps.variable_size, tier.caps.run) == ("remote", True, True, 1)
    tier.close()


@pytest.mark.parametrize(
    "options", [{"timeout": 0}, {"slowest": -1}, {"largest": 0}, {"threads": 0}, {"absent_ttl": -1}, {"threads": 257}]
)
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        RemoteOptions(**options)


# ---- in the configuration and in the store


def test_settings_come_from_anywhere_and_need_host(tmp_path: Path) -> None:
    loaded = load_config(
        environ={"KVTIER_TIERING__REMOTE__URL": "valkey://h", "KVTIER_TIERING__REMOTE__TTL": "60"}, search=False
    )
    assert loaded.config.tiering.remote == RemoteSettings(url="valkey://h", ttl=60)
    assert load_config(environ={}, search=False).config.tiering.remote is None
    with pytest.raises(ConfigError, match="remote needs host"):
        load_config({"tiering": {"host": None, "remote": {"url": "valkey://h"}}}, environ={}, search=False)
    remote = {"url": "valkey://h", "password_file": "/f", "password_variable": "V"}
    with pytest.raises(ConfigError, match="both name the password; keep one"):
        load_config({"tiering": {"remote": remote}}, environ={}, search=False)


def test_all_lower_tiers_have_one_write_rule(tmp_path: Path) -> None:
    nvme = {"path": str(tmp_path), "write": "leave"}
    for write, allowed in (("leave", True), (None, True), ("through", False)):
        tiering = {"tiering": {"nvme": nvme, "remote": {"url": "valkey://h", "write": write}}}
        if allowed:
            assert load_config(tiering, environ={}, search=False).config.tiering.remote is not None
        else:
            with pytest.raises(ConfigError, match="one rule holds for all lower tiers"):
                load_config(tiering, environ={}, search=False)


def test_the_store_has_it_below_all_others(tmp_path: Path) -> None:
    settings = TieringSettings(
        host=HostSettings(capacity=1 << 20),
        nvme=NvmeSettings(path=tmp_path / "nvme", capacity=1 << 20, segment_size=1 << 20, min_free=0),
        remote=RemoteSettings(url=NOBODY, timeout=0.2),
    )
    store = open_store(settings)
    assert store is not None
    assert [tier.name for tier in store.tiers] == ["host", "nvme", "remote"]
    store.close()


def test_a_lossy_format_needs_consent() -> None:
    settings = TieringSettings(host=HostSettings(capacity=1 << 20), remote=RemoteSettings(url=NOBODY, format="int8"))
    with pytest.raises(ConfigError, match=r"tiering\.remote\.format = 'int8' is lossy"):
        open_store(settings)
