"""A model with latent attention (DeepSeek-V2): one row of latent and rope key per token, and formats made for it.

The weights are random, made on the spot by transformers (`pip install transformers`), so that the texts mean nothing:
what one sees is sizes, and that what comes back from the tiers gives the same tokens as computing does.

python examples/mla_model.py
"""

import sys
import tempfile
from pathlib import Path

from kvtier import LLM, SamplingParams

SIZES = {
    "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 8, "kv_lora_rank": 64, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "max_position_embeddings": 512, "topk_method": "greedy", "eos_token_id": 0,
    "initializer_range": 0.2,
}  # fmt: skip
TEXT = "Boats longer than twelve metres moor at the outer pier; the crane is free on weekdays from eight to ten. "


def make_model(directory: Path) -> None:
    import torch  # noqa: PLC0415
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    DeepseekV2ForCausalLM(DeepseekV2Config(**SIZES)).save_pretrained(directory)
    letters = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def run(model: Path, fmt: str) -> tuple[int, int, bool]:
    """Bytes of a token in host, tokens loaded, and whether they gave what computing gave."""
    tiering = {"host": {"capacity": "16MiB", "format": fmt}, "accept_lossy": fmt != "raw", "recompute_gate": False}
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with LLM(model, tiering=tiering, config={"model": {"dtype": "float32"}}, num_blocks=64) as llm:
        cold = llm.generate(TEXT, params)
        llm.clear_device_cache()
        warm = llm.generate(TEXT, params)
        loaded = warm.metrics.loaded_tokens
        return llm.loaded_bytes()["host"] // max(loaded, 1), loaded, warm.token_ids == cold.token_ids


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory))
        found = {fmt: run(Path(directory), fmt) for fmt in ("raw", "mla8", "mla4")}
    heads, width = SIZES["num_attention_heads"], SIZES["qk_nope_head_dim"] + SIZES["qk_rope_head_dim"]
    as_heads = SIZES["num_hidden_layers"] * heads * (width + SIZES["v_head_dim"]) * 4
    print(f"K and V of all heads would be {as_heads} bytes a token")
    for fmt, (nbytes, loaded, same) in found.items():
        answer = "the same answer" if same else "another answer"
        print(f"{fmt:5} {nbytes:5} bytes a token in host; {loaded} tokens loaded, {answer}")
    sizes = [nbytes for nbytes, _, _ in found.values()]
    return 0 if found["raw"][2] and as_heads > sizes[0] > 2 * sizes[1] > 2 * sizes[2] else 1


if __name__ == "__main__":
    sys.exit(main())
