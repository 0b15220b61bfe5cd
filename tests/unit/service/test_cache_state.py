"""What outlives the process: blocks on disk are found again, and what is damaged is not guessed at."""

import json
import os
import stat

import pytest
from cache_world import OPAQUE, blocks, caller, chain, data, open_cache, put, read, tenants_file

from kvtier.config import load_config
from kvtier.errors import ConfigError, TierUnavailable
from kvtier.service.cache import LOCAL, Cache, NamespaceSpec, ServiceError
from kvtier.service.cache.state import StateDirectory

STATE = "default.json"


def test_a_restart_finds_namespaces_and_their_blocks_on_disk(tmp_path):
    keys = chain(6)
    first = open_cache(tmp_path)
    before = first.create_namespace(LOCAL, OPAQUE)
    put(first, keys)
    first.flush()
    first.close()
    second = open_cache(tmp_path)
    assert second.match(LOCAL, "blocks", keys) == ("nvme",) * 6
    assert read(second, keys) == [data(key) for key in keys]
    (after,) = second.namespaces(LOCAL)
    assert (after.spec, after.created) == (before.spec, before.created)
    second.close()


def test_a_restart_keeps_tenants_apart(tmp_path):
    settings = {"tenants": tenants_file(tmp_path, alice=16, bob=16)}
    for turn in range(2):
        opened = open_cache(tmp_path, settings)
        for name in ("alice", "bob"):
            opened.create_namespace(caller(name), OPAQUE)
        if not turn:
            put(opened, chain(2), caller("alice"))
            opened.flush()
        assert opened.match(caller("bob"), "blocks", chain(2)) == ()
        assert len(opened.match(caller("alice"), "blocks", chain(2))) == 2
        opened.close()
    salts = {
        json.loads(json.loads((tmp_path / "state" / f"{name}.json").read_text())["tenant"])["salt"]
        for name in ("alice", "bob")
    }
    assert len(salts) == 2


def test_secrets_are_readable_by_their_owner_alone(tmp_path):
    opened = open_cache(tmp_path)
    opened.create_namespace(LOCAL, OPAQUE)
    assert stat.S_IMODE((tmp_path / "state" / STATE).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "nvme" / "default").stat().st_mode) == 0o700
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == [STATE, "lock"]
    opened.close()


def test_a_dropped_namespace_is_gone_for_good(tmp_path):
    opened = open_cache(tmp_path)
    opened.create_namespace(LOCAL, OPAQUE)
    put(opened, chain(3))
    opened.flush()
    opened.drop_namespace(LOCAL, "blocks")
    opened.create_namespace(LOCAL, OPAQUE)
    assert opened.match(LOCAL, "blocks", chain(3)) == ()
    opened.drop_namespace(LOCAL, "blocks")
    opened.close()
    opened = open_cache(tmp_path)
    assert opened.namespaces(LOCAL) == []
    assert opened.stats(LOCAL).tenants[0].tiers["nvme"]["blocks"] == 0
    opened.close()


def test_a_cleared_namespace_is_empty_in_every_tier(tmp_path):
    opened = open_cache(tmp_path)
    for name in ("blocks", "other"):
        opened.create_namespace(LOCAL, NamespaceSpec(name, None))
        put(opened, chain(3), ns=name)
    opened.flush()
    opened.clear_namespace(LOCAL, "blocks")
    assert opened.match(LOCAL, "blocks", chain(3)) == ()
    assert opened.match(LOCAL, "other", chain(3)) == ("host",) * 3
    assert opened.stats(LOCAL).tenants[0].tiers["nvme"]["blocks"] == 3
    opened.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-10],
        lambda text: "[" * 100_000,
        lambda text: "",
        lambda text: text.replace("blocks", "bl0cks"),
        lambda text: text.replace('"format": 1', '"format": 9'),
        lambda text: "[]",
        lambda text: json.dumps({"format": 1}),
    ],
)
def test_damaged_state_is_refused_with_advice(tmp_path, damage):
    opened = open_cache(tmp_path)
    opened.create_namespace(LOCAL, OPAQUE)
    opened.close()
    path = tmp_path / "state" / STATE
    path.write_text(damage(path.read_text()))
    with pytest.raises(ConfigError, match=r"damaged or of another version.*restore it from a backup; or remove it"):
        open_cache(tmp_path)
    # Nothing was written over it, and nothing is held.
    with pytest.raises(ConfigError, match="damaged"):
        open_cache(tmp_path)
    path.unlink()
    opened = open_cache(tmp_path)
    assert opened.namespaces(LOCAL) == []
    opened.close()


def test_state_that_cannot_be_written_makes_no_namespace(tmp_path, monkeypatch):
    opened = open_cache(tmp_path)

    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvtier.service.cache.state.replace_file", full)
    with pytest.raises(ServiceError, match="No space left") as caught:
        opened.create_namespace(LOCAL, OPAQUE)
    assert (caught.value.status, caught.value.code) == (503, "busy")
    assert opened.namespaces(LOCAL) == []
    monkeypatch.undo()
    opened.create_namespace(LOCAL, OPAQUE)
    opened.put(LOCAL, "blocks", blocks(chain(1))).result(10)
    opened.close()


def test_a_file_that_could_not_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    state = StateDirectory(tmp_path / "state")
    before = state.load("default")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(ConfigError, match="Input/output error"):
        state.save("default", before)
    monkeypatch.undo()
    assert state.load("default") == before
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == [STATE, "lock"]
    state.close()


def test_one_process_at_a_time_uses_a_directory(tmp_path):
    opened = open_cache(tmp_path)
    with pytest.raises(TierUnavailable, match="another cache service uses it"):
        open_cache(tmp_path)
    opened.close()
    open_cache(tmp_path).close()


def test_tiers_that_outlive_the_process_need_state(tmp_path):
    with pytest.raises(ConfigError, match=r"service\.state = none"):
        open_cache(tmp_path, {"state": None})


def test_without_state_secrets_end_with_the_process():
    first, second = StateDirectory(None), StateDirectory(None)
    assert first.load("default").salt != second.load("default").salt
    assert "salt" not in repr(first.load("default"))


def test_the_service_needs_host_memory():
    config = load_config({"tiering": {"host": None}}, environ={}, search=False).config
    with pytest.raises(ConfigError, match=r"tiering\.host = none"):
        Cache.open(config.service, config.tiering)
