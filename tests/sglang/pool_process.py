"""SGLang's own host pools and its own controller's code over KVTierStorage, in every layout, on the CPU.

pool_process.py WHEEL DEPENDENCIES DIRECTORY     prints one JSON object: case -> what was found
"""

import importlib
import json
import sys
from pathlib import Path
from queue import Queue

import torch

from kvtier.keys import Chain
from tests.sglang.conftest import stand_in
from tests.sglang_world import DIM, HEADS, LATENT, LAYERS, MHA_LAYOUTS, MLA_LAYOUTS, PAGE, FakePool, noise, slots

PAGES = 12
DTYPE = torch.bfloat16
_OPERATORS = (
    *("nms", "qnms", "roi_align", "_roi_align_backward", "qroi_align", "ps_roi_align", "_ps_roi_align_backward"),
    *("roi_pool", "_roi_pool_backward", "ps_roi_pool", "_ps_roi_pool_backward"),
    *("deform_conv2d", "_deform_conv2d_backward"),
)


def prepare(wheel: str, dependencies: str) -> torch.library.Library:
    """Let SGLang's modules be imported: its wheel, what they import, and names for operators that nobody calls."""
    stand_in(Path(wheel))
    sys.path.append(dependencies)
    library = torch.library.Library("torchvision", "DEF")
    for name in _OPERATORS:
        library.define(f"{name}(Tensor a, Tensor b, float c) -> Tensor")
    return library


def module(name: str):
    return importlib.import_module(f"sglang.srt.{name}")


def real_pool(layout: str, mla: bool):
    """A pool as SGLang builds it, over a device pool in CPU memory."""
    device = module("mem_cache.device_pool_info")
    tokens = (PAGES - 1) * PAGE
    common = {
        "host_to_device_ratio": 1.0,
        "host_size": 0,
        "page_size": PAGE,
        "layout": layout,
        "pin_memory": False,
        "device": "cpu",
        "device_capacity_tokens": tokens,
        "start_layer": 0,
        "end_layer": LAYERS,
    }
    pointers = torch.zeros(LAYERS, dtype=torch.uint64)
    if mla:
        info = device.MLABufferInfo(
            buffers=tuple(torch.zeros(tokens, 1, LATENT, dtype=DTYPE) for _ in range(LAYERS)),
            data_ptrs=pointers,
            layer_indices=tuple(range(LAYERS)),
            device_layer_num=LAYERS,
            page_size=PAGE,
            kv_lora_rank=LATENT - 8,
            qk_rope_head_dim=8,
            kv_cache_dim=LATENT,
            dtype=DTYPE,
            device=torch.device("cpu"),
        )
        return module("mem_cache.pool_host.mla").MLATokenToKVPoolHost(info, target_layer_num=LAYERS, **common)
    rows = [tuple(torch.zeros(tokens, HEADS, DIM, dtype=DTYPE) for _ in range(LAYERS)) for _ in range(2)]
    info = device.MHABufferInfo(
        buffers=device.KVBuffers(
            k=rows[0], v=rows[1], k_data_ptrs=pointers, v_data_ptrs=pointers, layout=next(iter(device.KVBufferLayout))
        ),
        page_size=PAGE,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=DTYPE,
        device=torch.device("cpu"),
    )
    return module("mem_cache.pool_host.mha").MHATokenToKVPoolHost(info, **common)


def fill(buffer: torch.Tensor, seed: object) -> None:
    """Give a pool bits that only this seed has."""
    buffer.copy_(torch.frombuffer(bytearray(noise(seed, buffer.nbytes)), dtype=DTYPE).reshape(buffer.shape))


def like_the_fake(pool, layout: str, mla: bool) -> bool:
    """Whether our own pool has SGLang's shape, flat pages and ranges."""
    fake = FakePool(layout, mla=mla, pages=pool.page_num)
    fill(pool.kv_buffer, layout)
    fake.buffer.copy_(pool.kv_buffer.reshape(fake.buffer.shape))
    wanted = slots([3, 0, 7])
    calls = [lambda one: one.get_page_buffer_meta(wanted)]
    if layout == "page_head":
        calls.append(lambda one: one.get_split_heads_page_buffer_meta(wanted, 2))
    for call in calls:
        (ours, our_sizes), (theirs, their_sizes) = call(fake), call(pool)
        ours = [place - fake.buffer.data_ptr() for place in ours]
        theirs = [place - pool.kv_buffer.data_ptr() for place in theirs]
        if (ours, list(our_sizes)) != (theirs, list(their_sizes)):
            return False
    flat = pool.get_data_page(3 * PAGE)
    return torch.equal(flat, fake.get_data_page(3 * PAGE)) and (
        pool.get_dummy_flat_data_page().numel() == fake.get_dummy_flat_data_page().numel()
    )


def controller_over(storage, pool, *, zero_copy: bool):
    """SGLang's controller, with what its storage methods use of it and without its threads."""
    controllers = module("managers.cache_controller")
    controller = controllers.HiCacheController.__new__(controllers.HiCacheController)
    controller.storage_backend, controller.storage_host_pool = storage, pool
    controller.mem_pool_host, controller.page_size = pool, PAGE
    controller.prefetch_sync_queue = Queue()
    controller.page_get_func = controller._page_get_zero_copy if zero_copy else controller._generic_page_get
    controller.page_set_func = controller._page_set_zero_copy if zero_copy else controller._generic_page_set
    return controllers, controller


def round_trip(directory: Path, layout: str, mla: bool, *, zero_copy: bool, prefix_keys: list[str] | None) -> int:
    """Back pages up and prefetch them into other places, by SGLang's code; how many came back right."""
    contract = module("mem_cache.hicache_storage")
    extra = {
        "backend_name": "kvtier",
        "module_path": "kvtier_sglang",
        "class_name": "KVTierStorage",
        "host": {"capacity": "256KiB"},
        "nvme": {"path": str(directory), "capacity": "8MiB", "segment_size": "1MiB", "min_free": 0},
    }
    config = contract.HiCacheStorageConfig(0, 1, 0, 1, 0, 1, mla, False, False, "some/model", extra_config=extra)
    pool = real_pool(layout, mla)
    storage = module("mem_cache.storage.backend_factory").StorageBackendFactory.create_backend("dynamic", config, pool)
    storage.register_mem_pool_host(pool)
    controllers, controller = controller_over(storage, pool, zero_copy=zero_copy)
    fill(pool.kv_buffer, directory)
    tokens = list(range(100, 100 + 5 * PAGE))
    names = module("mem_cache.utils").get_storage_hash_str(tokens, None, page_size=PAGE)
    chain = Chain(PAGE)
    chain.extend(tokens)
    assert names == [key.hex() for key in chain.keys], "SGLang's hashes are kvtier's chain keys"
    wanted = [pool.get_data_page(page * PAGE).clone() for page in range(5)]
    backup = controllers.StorageOperation(slots(range(5)), tokens, hash_value=names, prefix_keys=prefix_keys)
    controller._page_backup(backup)
    assert backup.completed_tokens == 5 * PAGE
    storage.pages.store.flush()
    storage.pages.store.clear("host")
    pool.kv_buffer.zero_()
    prefetch = controllers.PrefetchOperation("request", tokens, None, prefix_keys)
    found, count = controller._storage_hit_query(prefetch)
    assert (found, count) == (names, 5 * PAGE)
    places = [9, 1, 10, 0, 6]
    prefetch.hash_value, prefetch.host_indices = found, slots(places)
    arrived = controller._page_transfer(prefetch)
    right = [torch.equal(pool.get_data_page(place * PAGE), bits) for place, bits in zip(places, wanted, strict=True)]
    storage.close()
    return sum(right[:arrived])


def main() -> None:
    wheel, dependencies, directory = sys.argv[1:]
    library = prepare(wheel, dependencies)
    # SGLang wants 10 GB left over, which such small pools do not need.
    with module("mem_cache.pool_host.base").host_memory_budget_scope(1 << 30):
        results = tried(Path(directory))
    del library
    print(json.dumps(results))


def tried(directory: Path) -> dict[str, object]:
    """All cases."""
    results: dict[str, object] = {}
    for mla, layouts in ((False, MHA_LAYOUTS), (True, MLA_LAYOUTS)):
        for layout in layouts:
            name = f"{'mla' if mla else 'mha'} {layout}"
            results[f"{name} fake"] = like_the_fake(real_pool(layout, mla), layout, mla)
            for zero_copy, prefix_keys in ((True, None), (True, []), (False, None)):
                case = f"{name} {'v1' if zero_copy else 'generic'} {'chained' if prefix_keys == [] else 'bare'}"
                place = directory / case.replace(" ", "-")
                results[case] = round_trip(place, layout, mla, zero_copy=zero_copy, prefix_keys=prefix_keys)
    return results


if __name__ == "__main__":
    main()
