"""One rank of an SGLang server, as far as storage goes, in a process of its own: reads commands, writes answers.

rank_process.py WHEEL DIRECTORY TP_RANK TP_SIZE
(mha|mla) (save SEED | load SEED | present)      one a line, of a model of each kind; answers are JSON
"""

import json
import sys
from pathlib import Path

from tests.sglang.conftest import stand_in
from tests.sglang_world import FakePool, hashes, slots

PAGES = 6
NAMES = hashes("shared", PAGES)


def main() -> None:
    wheel, directory, rank, size = sys.argv[1:]
    stand_in(Path(wheel))
    models = {
        kind: attached(Path(directory) / kind, int(rank), int(size), mla=kind == "mla") for kind in ("mha", "mla")
    }
    for line in sys.stdin:
        kind, verb, *rest = line.split()
        print(json.dumps(answer(*models[kind], verb, rest)), flush=True)
    for storage, _ in models.values():
        storage.close()


def attached(directory: Path, rank: int, size: int, *, mla: bool):
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    extra = {
        "backend_name": "kvtier",
        "module_path": "kvtier_sglang",
        "class_name": "KVTierStorage",
        "interface_v1": 1,
        "host": {"capacity": "256KiB"},
        "nvme": {"path": str(directory), "capacity": "8MiB", "segment_size": "1MiB", "min_free": 0},
    }
    config = HiCacheStorageConfig(rank, size, 0, 1, 0, 1, mla, False, True, "some/model", extra_config=extra)
    pool = FakePool("page_first", mla=mla, pages=PAGES)
    storage = StorageBackendFactory.create_backend("dynamic", config, pool)
    storage.register_mem_pool_host(pool)
    return storage, pool


def answer(storage, pool, verb, rest):
    if verb == "present":
        return storage.batch_exists(NAMES)
    if verb == "save":
        for page in range(PAGES):
            pool.fill(page, (rest[0], page))
        saved = storage.batch_set_v1(NAMES, slots(range(PAGES)))
        storage.pages.store.flush()
        return saved
    pool.buffer.zero_()
    arrived = storage.batch_get_v1(NAMES, slots(range(PAGES)))
    found = [pool.bits(page) for page in range(PAGES)]
    for page in range(PAGES):
        pool.fill(page, (rest[0], page))
    return [good and bits == pool.bits(page) for page, (good, bits) in enumerate(zip(arrived, found, strict=True))]


if __name__ == "__main__":
    main()
