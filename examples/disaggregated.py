"""Long prompts arrive while an answer is being written: another process prefills them.

Exits with 1 where one was computed here after all.

python examples/disaggregated.py [MODEL]
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from kvtier import SamplingParams
from kvtier.disaggregated import DisaggregatedLLM

DOCUMENT = (
    "Harbour rules. Boats longer than twelve metres moor at the outer pier. Visitors register at the office before "
    "noon. Fires are allowed on the east beach only. The crane is free on weekdays between eight and ten. "
) * 6
QUESTIONS = ["Where do long boats moor?", "When is the crane free?"]


async def answer(llm: DisaggregatedLLM, name: str, prompt: str, tokens: int) -> int:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    loaded = 0
    async for output in llm.agenerate(prompt, params):
        if output.finish_reason:
            found = output.metrics
            loaded = found.loaded_tokens
            print(f"{name}: {found.loaded_tokens} tokens came from the other process, {found.computed_tokens} computed")
    return loaded


async def serve(llm: DisaggregatedLLM) -> int:
    """The fewest tokens of a question that came from the other process."""
    prompts = [f"{number}. {DOCUMENT}\nQuestion: {question}\nAnswer:" for number, question in enumerate(QUESTIONS)]
    async with asyncio.TaskGroup() as group:
        group.create_task(answer(llm, "story", "Once upon a time", 48))
        asked = [group.create_task(answer(llm, f"question {at}", prompt, 8)) for at, prompt in enumerate(prompts)]
    return min(task.result() for task in asked)


def main() -> int:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as directory:
        config = {"tiering": {"host": {"capacity": "256MiB"}, "nvme": {"min_free": 0}}}
        engines = {"num_blocks": 128}
        with DisaggregatedLLM(
            model, directory=Path(directory) / "kv", capacity="256MiB", prefill=engines, decode=engines, config=config
        ) as llm:
            return 0 if asyncio.run(serve(llm)) else 1


if __name__ == "__main__":
    sys.exit(main())
