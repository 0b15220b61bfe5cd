"""Several questions about one document: its KV is computed once, and found again by the next process.

Exits with 1 where the second life loads nothing.

python examples/shared_document.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path

from kvtier import LLM, SamplingParams

DOCUMENT = (
    "Harbour rules. Boats longer than twelve metres moor at the outer pier. Visitors register at the office before "
    "noon. Fires are allowed on the east beach only. The crane is free on weekdays between eight and ten. "
) * 3
QUESTIONS = ["Where do long boats moor?", "When is the crane free?"]


def main() -> int:
    model, loaded = sys.argv[1] if len(sys.argv) > 1 else None, {"first": 0, "second": 0}
    with tempfile.TemporaryDirectory() as directory:
        tiers = {"host": {"capacity": "256MiB"}, "nvme": {"path": str(Path(directory) / "kv"), "capacity": "256MiB"}}
        for life in ("first", "second"):
            # The second life stands for another process: it has nothing but the directory.
            with LLM(model, tiering=tiers, num_blocks=128) as llm:
                for question in QUESTIONS:
                    prompt = f"{DOCUMENT}\nQuestion: {question}\nAnswer:"
                    output = llm.generate(prompt, SamplingParams(max_tokens=12, temperature=0.0))
                    found = output.metrics
                    loaded[life] += found.loaded_tokens
                    print(
                        f"{life} life: {found.cached_tokens} tokens found on the device, {found.loaded_tokens} loaded, "
                        f"{found.computed_tokens} computed:{output.text.splitlines()[0] if output.text else ''}"
                    )
    return 0 if loaded["first"] == 0 < loaded["second"] else 1


if __name__ == "__main__":
    sys.exit(main())
