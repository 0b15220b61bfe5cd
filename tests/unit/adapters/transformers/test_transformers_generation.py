"""Generation over a restored prefix gives what it gives with transformers' own cache, in every mode."""

import pytest
import torch
from transformers_world import (
    BLOCK,
    assert_kv_is_the_models_own,
    cache_for,
    fed,
    generated,
    llama,
    nothing_is_held,
    opened,
    prompt,
    warm,
)

LENGTH = 30
FOUND = LENGTH // BLOCK * BLOCK

MODES = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "beams returned": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beam sampling": {"do_sample": True, "num_beams": 2},
    "in chunks": {"prefill_chunk_size": 1},
}


@pytest.fixture(scope="module")
def tiers(model):
    store = opened(model)
    warm(store, model, prompt(LENGTH))
    yield store
    store.close()


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_tokens_and_computes_the_rest_of_the_prompt_only(mode, tiers, model):
    ids = prompt(LENGTH)
    expected = generated(model, ids, **MODES[mode])
    cache = cache_for(tiers, ids, model)
    assert cache.restored == (FOUND,)
    assert cache.get_seq_length() == FOUND
    with fed(model) as lengths:
        found = generated(model, ids, cache=cache, **MODES[mode])
    assert torch.equal(found, expected)
    prefill = [1, 1] if mode == "in chunks" else [LENGTH - FOUND]
    assert lengths == prefill + [1] * (expected.shape[1] - LENGTH - 1)
    assert nothing_is_held(tiers)


def test_the_logits_are_close(tiers, model):
    ids, options = prompt(LENGTH), {"return_dict_in_generate": True, "output_logits": True}
    expected = generated(model, ids, **options).logits
    found = generated(model, ids, cache=cache_for(tiers, ids, model), **options).logits
    assert max(float((one - other).abs().max()) for one, other in zip(expected, found, strict=True)) < 1e-3


@pytest.mark.parametrize("drafts", ["prompt", "the model itself", "another model"])
def test_assisted_decoding_feeds_the_whole_prompt_and_so_begins_anew(drafts, tiers, model):
    assistant = {"the model itself": model, "another model": llama(seed=9)}.get(drafts)
    options = {"prompt_lookup_num_tokens": 3} if assistant is None else {"assistant_model": assistant}
    ids = torch.cat([prompt(LENGTH)] * 2, 1)
    expected = generated(model, ids)
    assert torch.equal(expected, generated(model, ids, **options))
    cache = cache_for(tiers, ids, model)
    assert cache.restored[0] >= FOUND
    found = generated(model, ids, cache=cache, **options)
    assert torch.equal(found, expected)
    assert cache.restored == (0,)
    # What it computed can be had by others, rejected drafts excepted.
    cache.commit(found)
    after = cache_for(tiers, found, model)
    assert after.restored[0] >= found.shape[1] - BLOCK - 1
    assert_kv_is_the_models_own(after, model, found)


def test_a_chat_finds_what_its_earlier_turns_computed_prompt_and_answer(tiers, model):
    conversation = prompt(13, seed=5)
    for turn in range(3):
        cache = cache_for(tiers, conversation, model)
        known = 0 if turn == 0 else (conversation.shape[1] - 7 - 1) // BLOCK * BLOCK
        assert cache.restored == (known,)
        answer = generated(model, conversation, cache=cache)
        assert torch.equal(answer, generated(model, conversation))
        cache.commit(answer)
        conversation = torch.cat([answer, prompt(7, seed=10 + turn)], 1)


def test_one_cache_may_serve_a_conversation_to_its_end(tiers, model):
    conversation = prompt(13, seed=6)
    cache = cache_for(tiers, conversation, model)
    for turn in range(2):
        answer = generated(model, conversation, cache=cache)
        assert torch.equal(answer, generated(model, conversation))
        conversation = torch.cat([answer, prompt(7, seed=20 + turn)], 1)
    cache.commit(answer)
    assert cache_for(tiers, answer, model).restored == ((answer.shape[1] - 1) // BLOCK * BLOCK,)


def test_a_forward_by_hand_goes_on_after_the_prefix(tiers, model):
    ids = prompt(LENGTH)
    cache = cache_for(tiers, ids, model)
    with torch.no_grad():
        found = model(ids[:, cache.get_seq_length() :], **cache.kwargs).logits[:, -1]
        expected = model(ids).logits[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_other_precisions_are_restored_bit_by_bit():
    for dtype in (torch.bfloat16, torch.float16):
        model = llama().to(dtype)
        store = opened(model)
        try:
            ids = prompt(LENGTH)
            cache = cache_for(store, ids, model)
            cache.commit(generated(model, ids, cache=cache))
            again = cache_for(store, ids, model)
            assert again.restored == (FOUND,)
            for restored, computed in zip(again.layers, cache.layers, strict=True):
                assert restored.keys.dtype == dtype
                assert torch.equal(restored.keys, computed.keys[:, :, :FOUND])
                assert torch.equal(restored.values, computed.values[:, :, :FOUND])
        finally:
            store.close()
