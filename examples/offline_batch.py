"""A batch of prompts with one long beginning, twice: computed once for all of them, and found the second time.

Requests of one batch wait for the KV that another one of them is computing; a second batch loads it from host memory.

python examples/offline_batch.py [MODEL]
"""

import sys

from kvtier import LLM, SamplingParams

GUIDE = (
    "You label messages to a harbour office. Labels: mooring, crane, complaint, other. Boats are mooring matters, "
    "loads are crane matters. Answer with the label alone. "
) * 4
MESSAGES = [
    "Where may a boat of 14 m lie?",
    "The crane was late again!",
    "Two tons on Monday at nine?",
    "Good morning.",
]


def main() -> int:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    prompts = [f"{GUIDE}\nMessage: {message}\nLabel:" for message in MESSAGES]
    params = SamplingParams(max_tokens=6, temperature=0.0)
    tiering = {"host": {"capacity": "256MiB"}, "recompute_gate": False}
    answers, computed = [], []
    # float32: whatever runs together, greedy answers are the same.
    with LLM(model, tiering=tiering, config={"model": {"dtype": "float32"}}, num_blocks=64) as llm:
        for batch in ("first", "second"):
            outputs = llm.generate(list(prompts), params)
            found, total = [output.metrics for output in outputs], sum(output.prompt_tokens for output in outputs)
            computed.append(sum(one.computed_tokens for one in found))
            answers.append([output.token_ids for output in outputs])
            print(
                f"{batch} batch: {total} prompt tokens, {computed[-1]} computed, "
                f"{sum(one.cached_tokens for one in found)} shared on the device, "
                f"{sum(one.loaded_tokens for one in found)} loaded from host"
            )
            llm.clear_device_cache()
    print(f"answers are {'the same' if answers[0] == answers[1] else 'DIFFERENT'}")
    return 0 if answers[0] == answers[1] and computed[1] < computed[0] < total / 2 else 1


if __name__ == "__main__":
    sys.exit(main())
