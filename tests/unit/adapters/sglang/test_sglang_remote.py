"""Pages that one machine stored are there for another one, through a cache service or an object store."""

import time

import pytest
from client_world import serving
from kvtier_sglang.geometry import geometry_of
from kvtier_sglang.pages import PageStore
from kvtier_sglang.settings import read_settings

from kvtier.errors import ConfigError
from tests.sglang_world import FakePool, FakeRank, hashes, slots

NAMES = hashes("chain", 5)


def opened(pool, remote, **rank):
    settings = read_settings({"host": {"capacity": "256KiB"}, "remote": remote, "load_deadline": 5})
    return PageStore.open(settings, geometry_of(pool, FakeRank(**rank)))


def stored(remote):
    """Bits of five pages, which a machine that is gone now stored."""
    pool = FakePool("page_first")
    for page in range(5):
        pool.fill(page, page)
    pages = opened(pool, remote)
    assert pages.save(NAMES, slots(range(5))) == [True] * 5
    pages.store.flush()
    pages.close()
    return [pool.bits(page) for page in range(5)]


def test_a_cache_service_shares_pages_and_its_death_is_a_miss(tmp_path):
    with serving(tmp_path, host="16MiB") as service:
        remote = {"url": f"kvtier://{service.data_address}", "absent_ttl": 0, "timeout": 1}
        wanted = stored(remote)
        pool = FakePool("page_first")
        pages = opened(pool, remote)
        assert pages.present(NAMES) == 5
        assert pages.load(NAMES, slots(range(5))) == [True] * 5
        assert [pool.bits(page) for page in range(5)] == wanted
        other = opened(pool, remote, model_name="other")
        assert other.present(NAMES) == 0
        other.close()
    pages.store.clear("host")
    start = time.monotonic()
    assert pages.load(NAMES, slots(range(5))) == [False] * 5
    assert pages.present(NAMES) == 0
    assert time.monotonic() - start < 10
    pages.close()


def test_an_object_store_keeps_one_page_per_object(tmp_path):
    url = f"file://{tmp_path / 'objects'}"
    with pytest.raises(ConfigError, match="tier remote keeps several blocks of a chain in one object"):
        opened(FakePool("page_first"), {"url": url})
    remote = {"url": url, "options": "run=1"}
    wanted = stored(remote)
    pool = FakePool("page_first")
    pages = opened(pool, remote)
    assert pages.load(NAMES, slots(range(5))) == [True] * 5
    assert [pool.bits(page) for page in range(5)] == wanted
    pages.close()
