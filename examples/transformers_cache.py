"""A chat with transformers: each turn finds the KV of the turns before it, the second one in another process's life.

Exits with 1 where the second turn loads nothing, or answers otherwise than without tiers.

python examples/transformers_cache.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path

import torch
from kvtier_transformers import KVTierCache, open_store
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvtier.engine.models.catalog import cache_dir, fetch_default_model

QUESTIONS = ["Name the capital of France, and one river that flows through it.", "And of Italy?"]


def main() -> int:
    model_path = sys.argv[1] if len(sys.argv) > 1 else fetch_default_model(cache_dir(), lambda _stage, _fraction: None)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    messages, restored, same = [], 0, True
    with tempfile.TemporaryDirectory() as directory:
        tiers = {"host": {"capacity": "64MiB"}, "nvme": {"path": str(Path(directory) / "kv"), "capacity": "64MiB"}}
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            # A store of its own for each turn stands for another process: it has nothing but the directory.
            store = open_store(tiers, model)
            try:
                cache = KVTierCache.from_prompt(store, ids, model)
                output = model.generate(ids, cache=cache, max_new_tokens=16, do_sample=False)
                put = cache.commit(output)
            finally:
                store.close()
            same &= torch.equal(output, model.generate(ids, max_new_tokens=16, do_sample=False))
            answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})
            restored = cache.restored[0]
            print(f"{restored} of {ids.shape[1]} tokens restored, {put.stored} blocks stored: {answer!r}")
    return 0 if restored and same else 1


if __name__ == "__main__":
    sys.exit(main())
