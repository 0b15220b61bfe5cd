"""vLLM's side of benchmarks/engine_vllm.py: one engine in this process, commands and answers as lines of JSON.

build/vllm-venv/bin/python benchmarks/vllm_peer.py MODEL eager|compiled
"""

import json
import os
import sys
import time
from typing import Any

# Before vLLM is imported: all in this process, all cores for the work, nothing fetched or sent.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_NUM_OF_RESERVED_CPU="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    DO_NOT_TRACK="1",
)

BLOCK_SIZE = 32  # the smallest that has vLLM's fast kernel


def engine(model: str, *, eager: bool) -> Any:
    from vllm import LLM  # noqa: PLC0415  after the environment is set

    return LLM(
        model,
        dtype="bfloat16",
        enforce_eager=eager,
        enable_prefix_caching=False,
        block_size=BLOCK_SIZE,
        max_model_len=1024,
        max_num_seqs=16,
    ).llm_engine


def run(llm: Any, prompts: list[list[int]], output: int, number: int) -> dict[str, float]:
    """All prompts at once; see `engine_vllm.Phases`, which this returns as a dictionary."""
    from vllm import SamplingParams  # noqa: PLC0415

    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=True)
    cpu, began = time.process_time(), time.perf_counter()
    for at, prompt in enumerate(prompts):
        llm.add_request(f"{number}-{at}", {"prompt_token_ids": prompt}, params)
    counts: dict[str, int] = {}
    marks = []  # (time, tokens): after every step in which all had begun and none had ended
    while llm.has_unfinished_requests():
        for each in llm.step():
            counts[each.request_id] = len(each.outputs[0].token_ids)
        if len(counts) == len(prompts) and max(counts.values()) < output:
            marks.append((time.perf_counter(), sum(counts.values())))
    ended = time.perf_counter()
    return {
        "seconds": ended - began,
        "cpu_seconds": time.process_time() - cpu,
        "tokens": sum(counts.values()),
        "decode_seconds": marks[-1][0] - marks[0][0],
        "decode_tokens": marks[-1][1] - marks[0][1],
    }


def main() -> None:
    # vLLM logs to standard output, which is the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    llm = engine(sys.argv[1], eager=sys.argv[2] == "eager")
    print(json.dumps("ready"), file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        prompts, output = json.loads(line)
        print(json.dumps(run(llm, prompts, output, number)), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
