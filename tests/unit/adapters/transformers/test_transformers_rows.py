"""Every operation on a restored cache does what it does on transformers' own."""

import pytest
import torch
from transformers import DynamicCache
from transformers_world import BLOCK, cache_for, generated, prompt, warm

LENGTH = 21
FOUND = 20


@pytest.fixture
def pair(store, plain):
    """The restored prefix of two prompts, and the same states in a cache of transformers' own."""
    ids = prompt(LENGTH, rows=2)
    warm(store, plain, ids)
    cache = cache_for(store, ids, plain)
    assert cache.restored == (FOUND, FOUND)
    own = DynamicCache(config=plain.config)
    for index, layer in enumerate(cache.layers):
        own.update(layer.keys.clone(), layer.values.clone(), index)
    return cache, own


OPERATIONS = {
    "crop": lambda cache: cache.crop(-3),
    "crop nothing": lambda cache: cache.crop(0),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(3),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "select by mask": lambda cache: cache.batch_select_indices(torch.tensor([False, True])),
    "reset": lambda cache: cache.reset(),
    "offload and prefetch": lambda cache: [(layer.offload(), layer.prefetch()) for layer in cache.layers],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_what_it_gives_on_a_dynamic_cache(name, pair, plain):
    cache, own = pair
    for each in pair:
        OPERATIONS[name](each)
    assert cache.get_seq_length() == own.get_seq_length()
    for length in (1, 5):
        assert cache.get_mask_sizes(length, 0) == own.get_mask_sizes(length, 0)
    assert (cache.is_croppable, cache.is_compileable, cache.is_sliding, cache.get_max_length()) == (
        own.is_croppable,
        own.is_compileable,
        own.is_sliding,
        own.get_max_length(),
    )
    rows = 2 if name == "reset" else len(own.layers[0].keys)
    with torch.no_grad():
        expected = plain(prompt(1, seed=9).repeat(rows, 1), cache=own).logits
        found = plain(prompt(1, seed=9).repeat(rows, 1), cache=cache).logits
    assert torch.equal(found, expected)
    for ours, theirs in zip(cache.layers, own.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


def test_rows_that_were_selected_are_stored_as_what_they_are(store, plain):
    ids = prompt(LENGTH, seed=2, rows=3)
    cache = cache_for(store, ids, plain)
    outputs = generated(plain, ids, cache=cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.commit(outputs[[2, 0]])
    stored = (outputs.shape[1] - 1) // BLOCK * BLOCK
    assert [cache_for(store, row[None], plain).restored for row in outputs] == [(stored,), (0,), (stored,)]


def test_repeating_by_hand_before_generation_is_the_same_as_letting_it_happen(store, plain):
    ids = prompt(LENGTH)
    warm(store, plain, ids)
    cache = cache_for(store, ids, plain)
    cache.batch_repeat_interleave(3)
    expected = generated(plain, ids, num_beams=3)
    assert torch.equal(generated(plain, ids, cache=cache, num_beams=3), expected)


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}])
def test_a_row_that_was_selected_may_be_repeated_by_generation(mode, store, plain):
    ids = prompt(LENGTH, seed=3, rows=2)
    warm(store, plain, ids)
    cache = cache_for(store, ids, plain)
    cache.batch_select_indices(torch.tensor([1]))
    found = generated(plain, ids[1:], cache=cache, **mode)
    assert torch.equal(found, generated(plain, ids[1:], **mode))
    assert cache.commit(found).dropped == 0


def test_a_cache_that_was_reset_begins_anew(store, plain):
    ids = prompt(LENGTH)
    expected = warm(store, plain, ids)
    cache = cache_for(store, ids, plain)
    cache.reset()
    assert cache.restored == (0,)
    assert torch.equal(generated(plain, ids, cache=cache), expected)
    assert cache.commit(expected).joined == (expected.shape[1] - 1) // BLOCK
