"""Long prompts arrive while an answer is being written: another process prefills them.

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


async def answer(llm: DisaggregatedLLM, name: str, prompt: str, tokens: int) -> None:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    async for output in llm.agenerate(prompt, params):
        if output.finish_reason:
            found = output.metrics
            print(f"{name}: {found.loaded_tokens} tokens came from the other process, {found.computed_tokens} computed")


async def serve(llm: DisaggregatedLLM) -> None:
    prompts = [f"{number}. {DOCUMENT}\nQuestion: {question}\nAnswer:" for number, question in enumerate(QUESTIONS)]
    async with asyncio.TaskGroup() as group:
        group.create_task(answer(llm, "story", "Once upon a time", 48))
        for number, prompt in enumerate(prompts):
            group.create_task(answer(llm, f"question {number}", prompt, 8))


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as directory:
        config = {"tiering": {"host": {"capacity": "256MiB"}, "nvme": {"min_free": 0}}}
        engines = {"num_blocks": 128}
        with DisaggregatedLLM(
            model, directory=Path(directory) / "kv", capacity="256MiB", prefill=engines, decode=engines, config=config
        ) as llm:
            asyncio.run(serve(llm))


if __name__ == "__main__":
    main()
