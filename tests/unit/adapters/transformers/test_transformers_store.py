"""What is found where: restarts, damage, other models, formats, and several caches at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from faults.fault_world import flip_in_host, flip_on_disk
from kvtier_transformers import KVTierCache, cached_shape, namespace_of, open_store, weights_fingerprint
from transformers import LlamaForCausalLM
from transformers_world import (
    BLOCK,
    assert_kv_is_the_models_own,
    cache_for,
    deepseek,
    generated,
    llama,
    nothing_is_held,
    nvme,
    opened,
    prompt,
    warm,
)

from kvtier.connector.parts import Parts
from kvtier.errors import ConfigError
from kvtier.keys import Chain

LENGTH = 30
FOUND = LENGTH // BLOCK * BLOCK


def block_keys(model, ids):
    chain = Chain(BLOCK)
    chain.extend(ids[0].tolist())
    return Parts(namespace_of(model, cached_shape(model).layout(BLOCK))).keys(chain.keys)


def test_a_conversation_goes_on_after_a_restart(model, tmp_path):
    with_nvme = {"nvme": nvme(tmp_path / "kv")}
    store = opened(model, **with_nvme)
    first = warm(store, model, prompt(LENGTH))
    store.close()
    store = opened(model, **with_nvme)
    try:
        second = torch.cat([first, prompt(5, seed=3)], 1)
        cache = cache_for(store, second, model)
        assert cache.restored == ((first.shape[1] - 1) // BLOCK * BLOCK,)
        assert_kv_is_the_models_own(cache, model, second)
        assert torch.equal(generated(model, second, cache=cache), generated(model, second))
        assert store.metrics.value("loaded_bytes_total", tier="nvme") > 0
        assert nothing_is_held(store)
    finally:
        store.close()


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_damaged_block_is_computed_again(tier, plain, tmp_path):
    store = opened(plain, nvme=nvme(tmp_path / "kv"))
    try:
        ids = prompt(LENGTH)
        expected = warm(store, plain, ids)
        store.flush()
        key = block_keys(plain, ids)[3]
        if tier == "host":
            flip_in_host(store.host, key)
            store.lower[0].remove([key]).wait(30)
        else:
            flip_on_disk(store.lower[0], key)
            store.clear("host")
        cache = cache_for(store, ids, plain)
        assert cache.restored == (3 * BLOCK,)
        assert torch.equal(generated(plain, ids, cache=cache), expected)
        assert store.metrics.value("corrupt_blocks_total", tier=tier) == 1
        # What it had to compute is there again.
        cache.commit(expected)
        assert cache_for(store, ids, plain).restored == (FOUND,)
        assert nothing_is_held(store)
    finally:
        store.close()


def test_another_model_dtype_setting_or_user_finds_nothing(store, plain):
    ids = prompt(LENGTH)
    warm(store, plain, ids)
    others = [
        llama(seed=1),
        llama().to(torch.bfloat16),
        llama(attn_implementation="eager"),
        llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}),
        llama(rms_norm_eps=1e-3),
    ]
    assert [cache_for(store, ids, other).restored for other in others] == [(0,)] * len(others)
    assert cache_for(store, ids, plain, salt="another user").restored == (0,)
    assert cache_for(store, ids, plain, fingerprint="a name").restored == (0,)
    assert KVTierCache.from_prompt(store, ids, plain, block_size=2 * BLOCK).restored == (0,)
    # The same weights, loaded once more, are the same model.
    assert cache_for(store, ids, llama()).restored == (FOUND,)


def test_a_name_of_the_callers_own_is_found_under_that_name_only(store, plain):
    ids = prompt(LENGTH)
    warm(store, plain, ids, fingerprint="llama v1")
    assert cache_for(store, ids, plain, fingerprint="llama v1").restored == (FOUND,)
    assert cache_for(store, ids, plain, fingerprint="llama v2").restored == (0,)
    assert cache_for(store, ids, plain).restored == (0,)


def test_weights_that_change_in_place_are_other_weights(store):
    model, ids = llama(seed=4), prompt(LENGTH)
    before = weights_fingerprint(model)
    assert weights_fingerprint(model) == before == weights_fingerprint(llama(seed=4))
    warm(store, model, ids)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] += 1
    assert weights_fingerprint(model) != before
    cache = cache_for(store, ids, model)
    assert cache.restored == (0,)
    model.load_state_dict(llama(seed=4).state_dict())
    assert cache_for(store, ids, model).restored == (FOUND,)


def test_tensors_at_the_address_of_former_ones_are_other_tensors(monkeypatch):
    """An allocator that gives the same memory again: what it held before is gone."""
    model = llama(seed=4)
    before = weights_fingerprint(model)
    projection = model.model.layers[0].self_attn.k_proj
    address = projection.weight.data_ptr()
    other = projection.weight.detach() + 1
    del projection.weight
    projection.weight = torch.nn.Parameter(other)
    data_ptr = torch.Tensor.data_ptr
    there = {other.data_ptr(): address}
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: there.get(data_ptr(tensor), data_ptr(tensor)))
    assert projection.weight.data_ptr() == address
    assert weights_fingerprint(model) != before


def test_weights_that_torch_does_not_count_writes_to_are_read_each_time():
    with torch.inference_mode():
        model = llama(seed=4)
        before = weights_fingerprint(model)
        model.model.layers[0].self_attn.k_proj.weight[0, 0] += 1
        assert weights_fingerprint(model) != before


def test_frequencies_that_were_rounded_are_those_of_another_model(store, tmp_path):
    rounded = llama().to(torch.bfloat16)
    rounded.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.dtype == rounded.dtype
    assert not torch.equal(loaded.model.rotary_emb.inv_freq, rounded.model.rotary_emb.inv_freq.float())
    cache = cache_for(store, prompt(LENGTH), rounded)
    cache.commit(generated(rounded, prompt(LENGTH), cache=cache))
    assert cache_for(store, prompt(LENGTH), rounded).restored == (FOUND,)
    assert cache_for(store, prompt(LENGTH), loaded).restored == (0,)


def test_a_default_device_is_no_place_for_blocks(store, plain):
    ids = prompt(LENGTH)
    cache = cache_for(store, ids, plain)
    output = generated(plain, ids, cache=cache)
    with torch.device("meta"):
        assert cache.commit(output).dropped == 0
        again = cache_for(store, ids, plain)
        again.batch_select_indices(torch.zeros(1, dtype=torch.long, device="cpu"))
    assert again.restored == (FOUND,)
    assert torch.equal(generated(plain, ids, cache=again), output)


@pytest.mark.parametrize("latent", [False, True])
def test_lossless_formats_change_nothing(latent, tmp_path):
    model = (deepseek if latent else llama)().to(torch.bfloat16)
    store = opened(model, nvme=nvme(tmp_path / "kv", format="bitsplit"))
    try:
        ids = prompt(LENGTH)
        cache = cache_for(store, ids, model)
        cache.commit(generated(model, ids, cache=cache))
        store.flush()
        store.clear("host")
        again = cache_for(store, ids, model)
        assert again.restored == (FOUND,)
        for restored, computed in zip(again.layers, cache.layers, strict=True):
            assert torch.equal(restored.keys, computed.keys[:, :, :FOUND])
            assert torch.equal(restored.values, computed.values[:, :, :FOUND])
    finally:
        store.close()


@pytest.mark.parametrize("fmt", ["int8", "mla8"])
def test_lossy_kv_is_reused_only_where_it_is_asked_for_and_makes_what_follows_lossy(fmt, tmp_path):
    model = deepseek() if fmt == "mla8" else llama()
    lossy = {"nvme": nvme(tmp_path / "kv", format=fmt), "accept_lossy": True}
    store = opened(model, **lossy)
    try:
        ids = prompt(LENGTH)
        computed = cache_for(store, ids, model)
        output = generated(model, ids, cache=computed)
        computed.commit(output)
        store.flush()
        store.clear("host")
        assert cache_for(store, ids, model, accept_lossy=False).restored == (0,)
        cache = cache_for(store, ids, model)
        assert cache.restored == (FOUND,)
        for restored, own in zip(cache.layers, computed.layers, strict=True):
            error = float((restored.keys - own.keys[:, :, :FOUND]).abs().max() / own.keys.abs().max())
            assert 0 < error < 0.02
        # What is computed on top is not exact, although its own bytes are: neither is what goes on from there.
        longer = torch.cat([ids, prompt(9, seed=8)], 1)
        cache = cache_for(store, longer, model)
        cache.commit(generated(model, longer, cache=cache))
        assert cache_for(store, longer, model, accept_lossy=False).restored == (0,)
        assert cache_for(store, longer, model).restored == (38 // BLOCK * BLOCK,)
        # Exact KV takes the place of it.
        exact = cache_for(store, longer, model, accept_lossy=False)
        exact.commit(generated(model, longer, cache=exact))
        assert cache_for(store, longer, model, accept_lossy=False).restored == (38 // BLOCK * BLOCK,)
    finally:
        store.close()


def test_a_format_that_cannot_take_the_blocks_or_was_not_asked_for_is_refused(plain, tmp_path):
    with pytest.raises(ConfigError, match="mla8"):
        opened(plain, nvme=nvme(tmp_path / "kv", format="mla8"), accept_lossy=True)
    with pytest.raises(ConfigError, match="lossy"):
        opened(plain, nvme=nvme(tmp_path / "kv", format="int8"))
    with pytest.raises(ConfigError, match=r"tiering\.host"):
        open_store({"host": None}, plain)
    assert not (tmp_path / "kv").exists()


def test_caches_share_a_store_from_several_threads(store, plain):
    prompts = [torch.cat([prompt(12), prompt(10, seed=seed)], 1) for seed in range(4)]
    expected = [generated(plain, ids, max_new_tokens=6) for ids in prompts]

    def answer(ids):
        # Greedy needs no seed, which would be the whole process's.
        cache = cache_for(store, ids, plain)
        output = plain.generate(ids, cache=cache, max_new_tokens=6, do_sample=False)
        cache.commit(output)
        return output

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(answer, prompts * 3))
    assert all(torch.equal(one, other) for one, other in zip(found, expected * 3, strict=True))
    assert all(cache_for(store, ids, plain).restored == (20,) for ids in prompts)
    assert nothing_is_held(store)


def test_a_host_tier_smaller_than_the_prompt_serves_what_it_can(plain):
    store = opened(plain, host={"capacity": "16KiB"})
    try:
        ids = prompt(LENGTH)
        expected = generated(plain, ids)
        for _ in range(3):
            cache = cache_for(store, ids, plain)
            assert torch.equal(generated(plain, ids, cache=cache), expected)
            put = cache.commit(expected)
        assert sum(put) == (expected.shape[1] - 1) // BLOCK
        assert put.dropped > 0
        assert nothing_is_held(store)
    finally:
        store.close()


def test_a_closed_store_is_a_miss(plain):
    store = opened(plain)
    ids = prompt(LENGTH)
    expected = warm(store, plain, ids)
    store.close()
    cache = cache_for(store, ids, plain)
    assert cache.restored == (0,)
    assert torch.equal(generated(plain, ids, cache=cache), expected)
    assert cache.commit(expected).stored == 0
