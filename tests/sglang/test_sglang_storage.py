"""KVTierStorage, built by SGLang's own factory from the flags that a user types, keeps SGLang's storage contract."""

import ast
import dataclasses
import inspect
import json
import subprocess
import sys
import types

import kvtier_sglang
import pytest
import torch

from kvtier.errors import ConfigError, TierUnavailable
from tests.sglang.conftest import python
from tests.sglang_world import MHA_LAYOUTS, MLA_LAYOUTS, FakePool, hashes, slots

POOLS = [(layout, False) for layout in MHA_LAYOUTS] + [(layout, True) for layout in MLA_LAYOUTS]
OWN = {"backend_name": "kvtier", "module_path": "kvtier_sglang", "class_name": "KVTierStorage", "interface_v1": 1}


def config(sglang, path, *, mla=False, rank=0, size=1, metrics=False, extra=(), **fields):
    nvme = {"path": str(path / "kv"), "capacity": "8MiB", "segment_size": "1MiB", "min_free": 0}
    whole = OWN | {"host": {"capacity": "256KiB"}, "nvme": nvme} | dict(extra)
    # The very text that a user types.
    parsed = json.loads(json.dumps(whole))
    return sglang.contract.HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=size,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=mla,
        enable_storage_metrics=metrics,
        is_page_first_layout=True,
        model_name="some/model",
        extra_config=parsed,
        **fields,
    )


def attached(sglang, path, pool, **options):
    """What `HiCacheController.attach_storage_backend` does."""
    storage = sglang.factory.create_backend("dynamic", config(sglang, path, **options), pool)
    storage.register_mem_pool_host(pool)
    storage.register_mem_host_pool_v2(pool, sglang.contract.PoolName.KV)
    storage.on_host_pools_registered()
    return storage


def below(storage):
    storage.pages.store.flush()
    storage.pages.store.clear("host")


@pytest.mark.parametrize(("layout", "mla"), POOLS)
def test_both_of_the_controllers_paths_bring_back_every_bit(sglang, tmp_path, layout, mla):
    pool, names = FakePool(layout, mla=mla), hashes("chain", 8)
    for page in range(8):
        pool.fill(page, page)
    wanted = [pool.bits(page) for page in range(8)]
    storage = attached(sglang, tmp_path, pool, mla=mla)
    info = sglang.contract.HiCacheStorageExtraInfo(prefix_keys=[])
    # `_page_set_zero_copy`, then `_generic_page_set`.
    assert all(storage.batch_set_v1(names[:4], slots(range(4)), info))
    assert storage.batch_set(names[4:], [pool.get_data_page(int(slots([page])[0])) for page in range(4, 8)])
    below(storage)
    assert storage.batch_exists([*names, "f" * 64], info) == 8
    assert storage.exists(names[7])
    assert not storage.exists("f" * 64)
    # `_page_get_zero_copy`
    pool.buffer.zero_()
    assert storage.batch_get_v1(names, slots(range(8)), info) == [True] * 8
    assert [pool.bits(page) for page in range(8)] == wanted
    # `_generic_page_get`
    targets = [pool.get_dummy_flat_data_page() for _ in names]
    found = storage.batch_get(names, targets)
    assert all(one is target for one, target in zip(found, targets, strict=True))
    for page, data in enumerate(found):
        pool.set_from_flat_data_page(int(slots([9])[0]), data)
        assert pool.bits(9) == wanted[page]
    storage.close()


def test_single_pages_and_what_is_not_there(sglang, tmp_path):
    pool, names = FakePool("page_first"), hashes("chain", 3)
    pool.fill(0, 0)
    storage = attached(sglang, tmp_path, pool)
    assert storage.set(names[0], pool.get_data_page(0)) is True
    assert storage.set(names[1]) is False
    assert storage.batch_set(names[1:]) is False
    fresh = storage.get(names[0])
    assert fresh.dtype == pool.dtype
    assert torch.equal(fresh, pool.get_data_page(0))
    target = pool.get_dummy_flat_data_page()
    assert storage.get(names[1], target) is None
    assert not target.any()
    assert [one is None for one in storage.batch_get(names)] == [False, True, True]
    storage.clear()
    assert storage.batch_exists(names) == 0
    storage.close()
    storage.close()


def test_sglangs_failure_injector_stands_before_it(sglang, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.5")
    pool, names = FakePool("page_first"), hashes("chain", 4)
    for page in range(4):
        pool.fill(page, page)
    wanted = [pool.bits(page) for page in range(4)]
    storage = attached(sglang, tmp_path, pool)
    assert type(storage).__name__ == "HiCacheStorageFailureInjector"
    outcomes = set()
    for _ in range(40):
        storage.batch_set_v1(names, slots(range(4)))
        pool.buffer.zero_()
        arrived = storage.batch_get_v1(names, slots(range(4)))
        outcomes.add(tuple(arrived))
        assert all(pool.bits(page) == wanted[page] for page in range(4) if arrived[page])
        for page in range(4):
            pool.fill(page, page)
    assert outcomes == {(True,) * 4, (False,) * 4}
    assert storage.get_stats() is None
    storage.clear()
    storage.close()


def test_every_method_takes_what_sglang_gives_it(sglang):
    storage = kvtier_sglang.KVTierStorage
    own = {name for name, _ in inspect.getmembers(storage, inspect.isfunction)} & set(vars(storage))
    base = dict(inspect.getmembers(sglang.contract.HiCacheStorage, inspect.isfunction))
    shared = {name for name in own & set(base) if not name.startswith("__")}
    assert {"get", "batch_get", "set", "batch_set", "exists", "batch_exists", "batch_get_v1", "batch_set_v1"} <= shared
    for name in shared:
        wanted, given = (list(inspect.signature(one).parameters) for one in (base[name], vars(storage)[name]))
        assert wanted == given, name
    assert not getattr(storage, "__abstractmethods__", None)


def test_models_with_other_pools_are_refused_when_they_attach(sglang, tmp_path):
    pool = FakePool("page_first")
    storage = attached(sglang, tmp_path, pool)
    for name in (sglang.contract.PoolName.SWA, sglang.contract.PoolName.MAMBA, sglang.contract.PoolName.DRAFT):
        with pytest.raises(
            ConfigError, match=f"host pool '{name}' of some/model: kvtier stores models whose only pool"
        ):
            storage.register_mem_host_pool_v2(pool, name)
    with pytest.raises(NotImplementedError):
        storage.batch_exists_v2(hashes("chain", 1))
    storage.close()


def test_what_is_wrong_stops_sglang_at_its_start(sglang, tmp_path):
    pool = FakePool("page_first")
    with pytest.raises(ConfigError, match=r"--hicache-storage-backend-extra-config: .*did you mean tiering\.nvme"):
        attached(sglang, tmp_path, pool, extra={"nvm": {"path": "/x"}})
    odd = FakePool("page_first")
    odd.layout = "page_first_kv_split"
    with pytest.raises(ConfigError, match="expected one of layer_first"):
        attached(sglang, tmp_path, odd)
    storage = sglang.factory.create_backend("dynamic", config(sglang, tmp_path), pool)
    with pytest.raises(TierUnavailable, match="no host pool is registered"):
        storage.exists("0" * 64)
    storage.close()
    assert not (tmp_path / "kv").exists()


def test_stats_are_sglangs_own(sglang, tmp_path, monkeypatch):
    # Its module imports half of SGLang; the class is taken from its text.
    source = sglang.path / "sglang" / "srt" / "observability" / "metrics_collector.py"
    found = [
        node
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "StorageMetrics"
    ]
    module = types.ModuleType("sglang.srt.observability.metrics_collector")
    names = {"dataclass": dataclasses.dataclass, "field": dataclasses.field, "List": list, "__name__": module.__name__}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(ast.Module(found, []), str(source), "exec"), names)
    module.StorageMetrics = names["StorageMetrics"]

    pool, chain = FakePool("page_first"), hashes("chain", 5)
    storage = attached(sglang, tmp_path, pool, metrics=True)
    storage.batch_set_v1(chain, slots(range(5)))
    storage.batch_get_v1(chain[:3], slots(range(3)))
    storage.batch_get_v1(hashes("other", 2), slots(range(2)))
    stats = storage.get_stats()
    assert isinstance(stats, module.StorageMetrics)
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([5], [3])
    assert all(speed > 0 for speed in stats.backup_bandwidth + stats.prefetch_bandwidth)
    assert storage.get_stats() == module.StorageMetrics()
    storage.close()


def ask(process, text):
    process.stdin.write(text + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def test_ranks_in_processes_of_their_own_share_a_directory(sglang, tmp_path):
    def started(rank):
        arguments = [str(sglang.path), str(tmp_path / "kv"), str(rank), "2"]
        return python("tests.sglang.rank_process", *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    first, second = started(0), started(1)
    try:
        # Latents: the writer's pages are everybody's; what the other one is told to store, it leaves to the writer.
        assert all(ask(first, "mla save first"))
        assert ask(second, "mla present") == 6
        assert all(ask(second, "mla load first"))
        assert all(ask(second, "mla save second"))
        assert all(ask(first, "mla load first"))
        # Heads: each has its own. The same hashes, other bytes.
        assert all(ask(first, "mha save first"))
        assert ask(second, "mha present") == 0
        assert all(ask(second, "mha save second"))
        assert all(ask(first, "mha load first"))
        assert all(ask(second, "mha load second"))
    finally:
        for process in (first, second):
            process.kill()
            process.communicate(timeout=30)
