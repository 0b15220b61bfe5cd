"""Lengths around block edges and batches padded on the left, against a model of what can be restored."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers_world import (
    BLOCK,
    assert_kv_is_the_models_own,
    cache_for,
    deepseek,
    fed,
    generated,
    llama,
    opened,
    prompt,
    warm,
)

LLAMA, DEEPSEEK = llama(), deepseek()


@settings(max_examples=25)
@given(
    stored=st.integers(1, 22),
    shared=st.integers(0, 22),
    length=st.integers(1, 22),
    latent=st.booleans(),
)
def test_a_prompt_restores_the_full_blocks_that_it_shares_and_never_its_last_token(stored, shared, length, latent):
    model = DEEPSEEK if latent else LLAMA
    store = opened(model)
    try:
        first = prompt(stored, seed=1)
        output = warm(store, model, first)
        shared = min(shared, length, output.shape[1])
        ids = torch.cat([output[:, :shared], prompt(length - shared, seed=2)], 1)
        same = int((ids[0, : output.shape[1]] == output[0, :length]).cumprod(0).sum())
        # The last token that was generated was never fed.
        expected = min(min(same, output.shape[1] - 1) // BLOCK * BLOCK, length - 1)
        cache = cache_for(store, ids, model)
        assert cache.restored == (expected,)
        if expected:
            assert_kv_is_the_models_own(cache, model, ids)
        with fed(model) as lengths:
            found = generated(model, ids, cache=cache, max_new_tokens=3)
        assert lengths[0] == length - expected
        assert torch.equal(found, generated(model, ids, max_new_tokens=3))
    finally:
        store.close()


@settings(max_examples=20)
@given(rows=st.lists(st.tuples(st.integers(1, 14), st.integers(0, 14)), min_size=2, max_size=4))
def test_a_padded_batch_begins_with_what_all_of_its_rows_have(rows):
    lengths = [length for length, _ in rows]
    store = opened(LLAMA)
    try:
        prompts = [prompt(length, seed=10 + row) for row, length in enumerate(lengths)]
        # Of each row, some leading tokens are in the tiers already.
        blocks = [min(row) // BLOCK for row in rows]
        for ids, count in zip(prompts, blocks, strict=True):
            if count:
                warm(store, LLAMA, ids[:, : count * BLOCK])
        slots = max(lengths)
        batch = torch.cat([torch.nn.functional.pad(ids, (slots - ids.shape[1], 0)) for ids in prompts])
        mask = (batch != 0).long()
        common = min(
            slots - 1, *(slots - length + count * BLOCK for length, count in zip(lengths, blocks, strict=True))
        )
        expected = tuple(max(common - (slots - length), 0) for length in lengths)
        cache = cache_for(store, batch, LLAMA, attention_mask=mask)
        assert cache.restored == expected
        options = {"attention_mask": mask, "max_new_tokens": 5, "pad_token_id": 0}
        found = generated(LLAMA, batch, cache=cache, **options)
        assert torch.equal(found, generated(LLAMA, batch, **options))
        cache.commit(found)
        # Each row by itself, without its padding, finds what the batch computed.
        for row, length in enumerate(lengths):
            alone = found[row : row + 1, slots - length :]
            after = cache_for(store, alone, LLAMA)
            assert after.restored == ((length + 5 - 1) // BLOCK * BLOCK,)
            if after.restored[0]:
                assert_kv_is_the_models_own(after, LLAMA, alone)
    finally:
        store.close()
