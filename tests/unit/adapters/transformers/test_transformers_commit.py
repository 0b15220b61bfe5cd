"""What `commit` stores, and what it must not: tokens that are not those of the KV."""

import copy

import pytest
import torch
from transformers_world import (
    BLOCK,
    assert_kv_is_the_models_own,
    cache_for,
    deepseek,
    generated,
    llama,
    opened,
    prompt,
)

from kvtier.errors import ModelError, RequestError

LENGTH = 30
FOUND = LENGTH // BLOCK * BLOCK


def test_samples_of_one_prompt_are_stored_each(store, plain):
    ids = prompt(LENGTH)
    cache = cache_for(store, ids, plain)
    outputs = generated(plain, ids, cache=cache, do_sample=True, temperature=2.0, num_return_sequences=3)
    assert len({tuple(row) for row in outputs.tolist()}) == 3
    cache.commit(outputs)
    for output in outputs:
        again = cache_for(store, output[None], plain)
        assert again.restored == ((outputs.shape[1] - 1) // BLOCK * BLOCK,)
        assert_kv_is_the_models_own(again, plain, output[None])


def test_after_beams_the_prompt_alone_is_stored(store, plain):
    ids = prompt(LENGTH)
    cache = cache_for(store, ids, plain)
    outputs = generated(plain, ids, cache=cache, num_beams=3, num_return_sequences=2)
    assert cache.commit(outputs) == (LENGTH // BLOCK, 0, 0)
    for output in outputs:
        again = cache_for(store, output[None], plain)
        assert again.restored == (FOUND,)
        assert_kv_is_the_models_own(again, plain, output[None])


def test_a_batch_of_prompts_with_beams_stores_each_prompt_once(store, plain):
    ids = prompt(LENGTH, rows=2)
    cache = cache_for(store, ids, plain)
    outputs = generated(plain, ids, cache=cache, num_beams=2)
    assert cache.commit(outputs) == (2 * (LENGTH // BLOCK), 0, 0)
    assert cache_for(store, ids, plain).restored == (FOUND, FOUND)


def test_without_sequences_the_prompts_are_stored_and_nothing_twice(store, plain):
    ids = prompt(LENGTH)
    cache = cache_for(store, ids, plain)
    assert cache.commit() == (0, 0, 0)  # nothing has been computed
    output = generated(plain, ids, cache=cache)
    blocks = (output.shape[1] - 1) // BLOCK
    assert cache.commit() == (LENGTH // BLOCK, 0, 0)
    assert cache.commit(output) == (blocks - LENGTH // BLOCK, LENGTH // BLOCK, 0)
    assert cache.commit(output) == (0, blocks, 0)


def test_rows_of_different_lengths_are_stored_as_far_as_they_go(store, plain):
    ids = prompt(LENGTH, rows=2)
    cache = cache_for(store, ids, plain)
    long, short = generated(plain, ids, cache=cache).tolist()
    cache.commit([long, short[: LENGTH + 3]])
    assert cache_for(store, torch.tensor([long]), plain).restored == ((len(long) - 1) // BLOCK * BLOCK,)
    assert cache_for(store, torch.tensor([short]), plain).restored == (32,)


@pytest.mark.parametrize("change", ["rows", "prompt", "answer", "vocabulary", "negative", "flat", "dictionary", "text"])
def test_sequences_that_are_not_the_caches_are_refused_before_anything_is_stored(change, store, plain):
    ids = prompt(LENGTH)
    cache = cache_for(store, ids, plain)
    output = generated(plain, ids, cache=cache)

    def with_token(slot, token):
        other = output.clone()
        other[0, slot] = token
        return other

    wrong = {
        "rows": output.repeat(2, 1),
        "prompt": with_token(3, output[0, 3] % 9 + 1),
        "answer": with_token(LENGTH + 2, output[0, LENGTH + 2] % 9 + 1),
        "vocabulary": with_token(3, 61),
        "negative": with_token(3, -1),
        "flat": output[0],
        "dictionary": {"sequences": output},
        "text": ["Paris"],
    }
    with pytest.raises(RequestError, match=r"sequence|token id"):
        cache.commit(wrong[change])
    assert store.stats()["host"]["blocks"] == 0


def test_one_row_that_cannot_be_stored_keeps_the_others_out_too(store, plain):
    ids = prompt(LENGTH, rows=2)
    cache = cache_for(store, ids, plain)
    output = generated(plain, ids, cache=cache)
    output[1, -3] = -1
    with pytest.raises(RequestError, match="token ids -1"):
        cache.commit(output)
    assert store.stats()["host"]["blocks"] == 0


FED_OTHERWISE = {
    "another prompt": lambda model, ids, cache: model(prompt(LENGTH, seed=1), cache=cache),
    "one token": lambda model, ids, cache: model(torch.cat([ids[:, :9], ids[:, 10:11], ids[:, 10:]], 1), cache=cache),
    "cropped and fed anew": lambda model, ids, cache: (
        model(ids, cache=cache),
        cache.crop(-20),
        model(prompt(20, seed=1), cache=cache),
    ),
    "other positions": lambda model, ids, cache: model(
        ids, cache=cache, position_ids=torch.arange(1, LENGTH + 1)[None]
    ),
    "padding that was not named": lambda model, ids, cache: generated(
        model, ids, cache=cache, attention_mask=(torch.arange(LENGTH) > 5).long()[None]
    ),
}


@pytest.mark.parametrize("fed", FED_OTHERWISE)
def test_kv_of_other_tokens_than_the_prompts_is_found_out(fed, model):
    store = opened(model)
    try:
        ids = prompt(LENGTH)
        cache = cache_for(store, ids, model)
        with torch.no_grad():
            FED_OTHERWISE[fed](model, ids, cache)
        with pytest.raises(RequestError, match="row 0 of the cache does not hold the KV of token"):
            cache.commit()
        assert store.stats()["host"]["blocks"] == 0
    finally:
        store.close()


@pytest.mark.parametrize("how", [{}, {"use_cache": False}])
def test_what_generate_fed_twice_is_found_out(how, store, plain):
    ids = prompt(LENGTH)
    cache = cache_for(store, ids, plain)
    generated(plain, ids, cache=cache)
    with pytest.raises(RequestError, match="row 0 of the cache does not hold the KV of token"):
        cache.commit(generated(plain, ids, cache=cache, **how))
    # The prompt is in its place nevertheless.
    assert cache.commit() == (LENGTH // BLOCK, 0, 0)
    assert_kv_is_the_models_own(cache_for(store, ids, plain), plain, ids)


def test_tokens_that_the_model_was_fed_after_a_crop_are_stored(store, plain):
    ids, other = prompt(LENGTH), torch.cat([prompt(LENGTH)[:, :10], prompt(20, seed=1)], 1)
    cache = cache_for(store, ids, plain)
    with torch.no_grad():
        plain(ids, cache=cache)
        cache.crop(-20)
        plain(other[:, 10:], cache=cache)
    cache.commit(other)
    again = cache_for(store, other, plain)
    assert again.restored == (FOUND,)
    assert_kv_is_the_models_own(again, plain, other)


@pytest.mark.parametrize("kind", [llama, deepseek])
def test_long_prompts_in_half_precision_are_what_they_are(kind):
    """Longer than what is compared at a time, and fed in other pieces."""
    model = kind().to(torch.bfloat16)
    store = opened(model)
    try:
        ids = prompt(2500)
        cache = cache_for(store, ids, model)
        with torch.no_grad():
            for piece in ids.split(900, 1):
                model(piece, cache=cache)
        assert cache.commit() == (2500 // BLOCK, 0, 0)
        ids[0, 2300] += 1 if ids[0, 2300] < 60 else -1
        with pytest.raises(RequestError, match="as token 2300 of its sequence"):
            cache.commit(ids)
    finally:
        store.close()


def test_a_model_that_changed_since_is_refused(store):
    model, ids = llama(seed=3), prompt(LENGTH)
    cache = cache_for(store, ids, model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(2)
    output = generated(model, ids, cache=cache)
    with pytest.raises(ModelError, match="changed since the cache was made"):
        cache.commit(output)
    # Under a name of the caller's own it is for him to know.
    named = cache_for(store, ids, model, fingerprint="step 7")
    output = generated(model, ids, cache=named)
    model.train()
    with pytest.raises(RequestError, match="training mode"):
        named.commit(output)
    model.eval()
    assert named.commit(output).dropped == 0


def test_the_whole_prompt_after_a_restored_prefix_is_refused(store, plain):
    ids = prompt(LENGTH)
    cache = cache_for(store, ids, plain)
    cache.commit(generated(plain, ids, cache=cache))
    cache = cache_for(store, ids, plain)
    with pytest.raises(RequestError, match=r"30 tokens after a restored prefix of 28.*get_seq_length"), torch.no_grad():
        plain(ids, cache=cache)


def test_another_model_than_the_caches_is_refused(store, plain):
    ids = prompt(LENGTH)
    cache = cache_for(store, ids, plain)
    cache.commit(generated(plain, ids, cache=cache))
    for other in (llama().to(torch.bfloat16), llama(num_key_value_heads=4), deepseek()):
        with pytest.raises(RequestError, match="make the cache from the model"):
            generated(other, ids, cache=cache_for(store, ids, plain))


def test_a_batch_that_is_no_multiple_of_the_prompts_is_refused(store, plain):
    ids = prompt(LENGTH, rows=2)
    cache = cache_for(store, ids, plain)
    cache.commit(generated(plain, ids, cache=cache))
    with pytest.raises(RequestError, match="make the cache from the model"):
        generated(plain, prompt(LENGTH, rows=3), cache=cache_for(store, ids, plain))
    # Nothing restored: the rows are counted when they are to be stored.
    cache = cache_for(store, prompt(LENGTH, seed=1, rows=2), plain)
    output = generated(plain, prompt(LENGTH, seed=1, rows=3), cache=cache)
    with pytest.raises(RequestError, match="3 rows in a cache of 2 prompts"):
        cache.commit(output)


def test_what_was_computed_under_autocast_is_not_stored_as_if_it_were_not(store, plain):
    ids = prompt(LENGTH)
    cache = cache_for(store, ids, plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = generated(plain, ids, cache=cache)
    if cache.layers[0].values.dtype == torch.float32:
        pytest.skip("this model casts its states back")
    with pytest.raises(ModelError, match="autocast"):
        cache.commit(output)
    assert store.stats()["host"]["blocks"] == 0


def test_a_forward_that_died_half_way_leaves_what_all_layers_have(store, plain):
    ids = prompt(LENGTH)
    cache = cache_for(store, ids, plain)
    with torch.no_grad():
        plain(ids[:, :17], cache=cache)
    hook = plain.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            plain(ids[:, 17:], cache=cache)
    finally:
        hook.remove()
    cache.commit()
    again = cache_for(store, ids, plain)
    assert again.restored == (16,)
    assert_kv_is_the_models_own(again, plain, ids)


def test_rows_that_only_some_layers_have_repeated_are_not_stored(store, plain):
    ids = prompt(LENGTH, rows=2)
    cache = cache_for(store, ids, plain)
    cache.commit(generated(plain, ids, cache=cache))
    cache = cache_for(store, ids, plain)
    hook = plain.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            generated(plain, ids, cache=cache, num_beams=2)
    finally:
        hook.remove()
    store.clear()
    # The first layer has four rows by now, the second one two.
    assert cache.commit() == (0, 0, 0)


def test_copies_of_a_prefix_go_on_by_themselves(store, plain):
    ids = prompt(LENGTH)
    cache = cache_for(store, ids, plain)
    cache.commit(generated(plain, ids, cache=cache))
    prefix = cache_for(store, ids, plain)
    for mode in ({}, {"num_beams": 3}, {"do_sample": True}):
        branch = copy.deepcopy(prefix)
        output = generated(plain, ids, cache=branch, **mode)
        assert torch.equal(output, generated(plain, ids, **mode))
        assert branch.commit(output).dropped == 0
    assert prefix.get_seq_length() == FOUND


def test_a_model_that_trains_along_stores_detached_kv():
    model = llama()
    store = opened(model)
    try:
        ids = prompt(LENGTH)
        cache = cache_for(store, ids, model)
        loss = model(ids, cache=cache, labels=ids).loss
        cache.commit()
        loss.backward()
        assert cache_for(store, ids, model).restored == (FOUND,)
    finally:
        store.close()
