"""Prefixes: blocks of token sequences for engines that wait for them in their own thread."""

import numpy as np
import pytest
from faults.fault_world import flip_in_host
from store_world import nothing_is_held

from kvtier import formats
from kvtier.config import load_config
from kvtier.connector.prefixes import Prefixes
from kvtier.errors import FormatMismatch
from kvtier.keys import Chain, Namespace
from kvtier.layout import GroupKind, LayerGroup, Layout
from kvtier.store import open_store

GROUP = LayerGroup(GroupKind.GQA, (0, 1), 2, 2, 8)
LAYOUT = Layout(4, (GROUP,))
NAMESPACE = Namespace("model", LAYOUT.fingerprint)


def opened(**tiering):
    settings = load_config({"tiering": {"host": {"capacity": "4MiB"}, **tiering}}).config.tiering
    return open_store(settings, block_bytes=LAYOUT.block_bytes(), layout=LAYOUT)


def chain_of(length):
    chain = Chain(4)
    chain.extend(range(length))
    return chain.keys


def block(depth):
    return np.random.default_rng(depth).standard_normal(LAYOUT.block_bytes() // 4).astype(np.float32)


@pytest.fixture
def store():
    store = opened()
    yield store
    store.close()


def put(prefixes, blocks, start=0, exact=True):
    data = [block(depth).view(np.uint8).data for depth in range(start, blocks)]
    return prefixes.put(chain_of(4 * blocks), start, data, exact=exact)


def test_what_was_put_is_held_and_read_in_place(store):
    prefixes = Prefixes(store, NAMESPACE, LAYOUT)
    assert put(prefixes, 3) == (3, 0, 0)
    assert prefixes.known(chain_of(20), exact=True) == 3
    assert put(prefixes, 5, start=3) == (2, 0, 0)
    with prefixes.hold(chain_of(30)) as held:
        assert len(held) == 5
        assert held.fetch(4) == 4
        assert held.is_exact(4)
        for depth in range(4):
            raw = held.raw(depth)
            assert raw.readonly
            np.testing.assert_array_equal(np.frombuffer(raw, np.float32), block(depth))
    assert nothing_is_held(store)


def test_nothing_is_found_of_another_namespace_or_chain(store):
    put(Prefixes(store, NAMESPACE, LAYOUT), 3)
    with Prefixes(store, Namespace("other", LAYOUT.fingerprint), LAYOUT).hold(chain_of(12)) as held:
        assert (len(held), held.fetch(0)) == (0, 0)
    with Prefixes(store, NAMESPACE, LAYOUT).hold(chain_of(12)[1:]) as held:
        assert len(held) == 2  # a run of blocks, wherever it begins: it is the caller's chain


def test_a_lower_tier_is_fetched_from_and_damage_ends_the_run(tmp_path):
    store = opened(nvme={"path": str(tmp_path), "capacity": "4MiB", "min_free": "0"})
    try:
        prefixes = Prefixes(store, NAMESPACE, LAYOUT)
        put(prefixes, 4)
        store.flush()
        store.clear("host")
        with prefixes.hold(chain_of(16)) as held:
            assert held.fetch(2) == 2
            np.testing.assert_array_equal(np.frombuffer(held.raw(1), np.float32), block(1))
        assert store.metrics.value("loaded_bytes_total", tier="nvme") == LAYOUT.block_bytes()
        lease = store.acquire(prefixes._parts.keys(chain_of(4)), "test").result()
        store.release(lease)
        flip_in_host(store.host, prefixes._parts.keys(chain_of(8))[1])
        store.lower[0].remove(prefixes._parts.keys(chain_of(8))[1:]).wait(30)
        with prefixes.hold(chain_of(16)) as held:
            assert len(held) == 1
        assert nothing_is_held(store)
    finally:
        store.close()


def test_encoded_blocks_are_decoded_and_lossy_ones_given_only_to_those_who_take_them():
    store = opened(host={"capacity": "4MiB", "format": "int8"}, accept_lossy=True)
    try:
        prefixes = Prefixes(store, NAMESPACE, LAYOUT)
        put(prefixes, 2)
        with prefixes.hold(chain_of(8), lossy=False) as held:
            assert len(held) == 0
        with prefixes.hold(chain_of(8)) as held:
            assert held.fetch(2) == 2
            assert not held.is_exact(1)
            np.testing.assert_allclose(np.frombuffer(held.raw(1), np.float32), block(1), atol=0.05)
    finally:
        store.close()


def test_a_block_that_cannot_be_decoded_is_a_miss_and_counted(monkeypatch):
    store = opened(host={"capacity": "4MiB", "format": "int8"}, accept_lossy=True)
    try:
        prefixes = Prefixes(store, NAMESPACE, LAYOUT)
        put(prefixes, 1)

        def refuse(*_):
            raise FormatMismatch("of another version")

        monkeypatch.setattr(formats.get("int8"), "decode", refuse)
        with prefixes.hold(chain_of(4)) as held:
            assert held.fetch(1) == 1
            assert held.raw(0) is None
        assert store.metrics.value("dropped_blocks_total", tier="host", reason="undecodable") == 1
    finally:
        store.close()


def test_blocks_of_several_parts_and_of_a_wrong_size_are_refused(store):
    layered = Layout(4, (GROUP, LayerGroup(GroupKind.GQA, (2,), 2, 2, 8)))
    with pytest.raises(FormatMismatch, match="2 parts"):
        Prefixes(store, Namespace("model", layered.fingerprint), layered)
    prefixes = Prefixes(store, NAMESPACE, LAYOUT)
    with pytest.raises(FormatMismatch):
        prefixes.put(chain_of(4), 0, [memoryview(b"short")], exact=True)
    assert prefixes.known(chain_of(4), exact=True) == 0
