"""From configuration to an open store."""

import contextlib
from pathlib import Path

import pytest

from kvtier.config import load_config
from kvtier.errors import ConfigError, KVTierError
from kvtier.formats.bitsplit import BitsplitFormat
from kvtier.layout import GroupKind, LayerGroup, Layout
from kvtier.policies import ArcPolicy, NextTurn
from kvtier.store import TieredStore, open_store


def settings(tmp_path: Path, host: dict[str, object], nvme: dict[str, object], **tiering: object):
    base = {"path": str(tmp_path / "nvme"), "capacity": "8MiB", "segment_size": "1MiB", "min_free": 0}
    overrides = {"tiering": {"host": {"capacity": "4MiB"} | host, "nvme": base | nvme} | tiering}
    return load_config(overrides, environ={}, search=False).config.tiering


def test_every_setting_reaches_the_store(tmp_path: Path) -> None:
    chosen = settings(
        tmp_path,
        {"policy": "arc"},
        {"format": "int8", "write": "leave", "write_budget": "1GB"},
        accept_lossy=True,
        load_deadline=2.5,
        prefetch="next_turn",
    )
    assert chosen.recompute_gate is True
    store = open_store(chosen, block_bytes=4096)
    assert isinstance(store, TieredStore)
    with contextlib.closing(store):
        assert store.options.formats == {"host": "raw", "nvme": "int8"}
        assert store.write_rule == "leave"
        assert store.options.write_budget == 10**9
        assert store.options.load_deadline == 2.5
        assert store.options.accept_lossy
        assert store.options.writeback_bytes == 1 << 20
        assert isinstance(store.options.prefetch, NextTurn)
        assert isinstance(store.host._table._policy, ArcPolicy)


@pytest.mark.parametrize(
    ("host", "nvme", "says"),
    [
        ({}, {"format": "int8"}, "tiering.nvme.format = 'int8' is lossy"),
        ({"format": "int8"}, {}, "set tiering.accept_lossy = true"),
        ({"format": "bitsplit"}, {}, "tiering.host.format = 'bitsplit'"),
        ({}, {"format": "int9"}, "did you mean 'int8"),
        ({"policy": "mru"}, {}, "'mru': unknown, expected one of lru, arc"),
        ({"capacity": 100}, {}, "one KV block of this model has 4096"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_made(
    tmp_path: Path, host: dict[str, object], nvme: dict[str, object], says: str
) -> None:
    with pytest.raises(KVTierError, match=says):
        open_store(settings(tmp_path, host, nvme), block_bytes=4096)
    assert not (tmp_path / "nvme").exists()


@pytest.mark.parametrize(("capacity", "keys"), [("4MiB", 1 << 14), ("504MiB", 1 << 15)])
def test_sessions_are_remembered_of_as_many_blocks_as_there_may_be(tmp_path: Path, capacity: str, keys: int) -> None:
    store = open_store(settings(tmp_path, {"capacity": capacity}, {}))
    assert isinstance(store, TieredStore)
    with contextlib.closing(store):
        assert store.options.session_keys == keys


def test_off_is_off() -> None:
    assert open_store(load_config({"tiering": {"host": None}}, environ={}, search=False).config.tiering) is None


@pytest.mark.parametrize("value", [0, -1, "soon"])
def test_a_deadline_is_a_number_of_seconds(value: object) -> None:
    with pytest.raises(ConfigError, match="load_deadline"):
        load_config({"tiering": {"load_deadline": value}}, environ={}, search=False)


class Growing(BitsplitFormat):
    """A third party's format of variable size."""

    id = sink = "growing"


def test_a_format_that_cannot_take_the_blocks_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    layout = Layout(16, (LayerGroup(GroupKind.GQA, (0, 1), 2, 2, 64, dtype="bfloat16"),))
    for host, nvme, message in (
        ("raw", "mla8", "tiering.nvme.format = 'mla8' cannot take this model's KV"),
        (f"{__name__}:Growing", "raw", "its blocks differ in size"),
    ):
        chosen = settings(tmp_path, {"format": host}, {"format": nvme}, accept_lossy=True)
        with pytest.raises(ConfigError, match=message):
            open_store(chosen, block_bytes=layout.block_bytes(), layout=layout)
        assert not (tmp_path / "nvme").exists()
