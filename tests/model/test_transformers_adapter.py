"""The transformers adapter on the real model: a chat over two turns, a restart between them."""

import pytest
import torch

pytest.importorskip("transformers")

from kvtier_transformers import KVTierCache, open_store
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.model

QUESTIONS = ["Name the capital of France, and one river that flows through it.", "And of Italy?"]


@pytest.fixture(scope="module")
def chat(default_model):
    tokenizer = AutoTokenizer.from_pretrained(default_model)
    return tokenizer, AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32).eval()


def answer(model, ids, **options):
    return model.generate(ids, max_new_tokens=12, do_sample=False, **options)


def test_the_second_turn_finds_the_first_one_after_a_restart(chat, tmp_path):
    tokenizer, model = chat
    tiering = {"host": {"capacity": "64MiB"}, "nvme": {"path": str(tmp_path), "capacity": "64MiB", "min_free": "0"}}
    messages, restored = [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = inputs["input_ids"]
        store = open_store(tiering, model)
        try:
            cache = KVTierCache.from_prompt(store, ids, model)
            output = answer(model, ids, cache=cache)
            cache.commit(output)
        finally:
            store.close()
        restored += cache.restored
        assert torch.equal(output, answer(model, ids))
        said = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": said})
    assert "Paris" in messages[1]["content"]
    assert restored[0] == 0
    assert restored[1] >= 48
