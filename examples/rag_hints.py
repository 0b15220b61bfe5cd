"""Retrieval: questions about a few documents, with hints that say what of a prompt comes back.

A prompt is instructions, a document, a question. The first two come back in other prompts (`reuse="likely"`, a
priority), the question never does (`dead_from_depth`). Host has room for half of all that: what the hints call dead
leaves first, and the documents stay.

python examples/rag_hints.py [MODEL]
"""

import sys

from kvtier import LLM, RequestHints, SamplingParams

INSTRUCTIONS = "Answer from the document alone, in a few words. "
DOCUMENTS = {
    "moorings": "Boats longer than twelve metres moor at the outer pier, all others at the quay. Buoys are yellow. "
    * 4,
    "crane": "The crane lifts two tons. It is free on weekdays between eight and ten, by appointment. " * 4,
}
ASKED = [f"Question {number}: what does it say, and what does it leave open, point by point?" for number in range(8)]
BLOCK = 16


def run(model: str | None, *, hinted: bool) -> int:
    """Tokens that were loaded when all documents are asked about once more."""
    tiering = {"host": {"capacity": "8MiB", "policy": "lru"}, "recompute_gate": False}
    params = SamplingParams(max_tokens=4, temperature=0.0)
    with LLM(model, tiering=tiering, num_blocks=64) as llm:
        shared = {name: len(llm.model.tokenizer.encode(INSTRUCTIONS + text)) for name, text in DOCUMENTS.items()}

        def ask(name: str, question: str) -> int:
            hints = RequestHints(priority=4.0, reuse="likely", dead_from_depth=shared[name] // BLOCK)
            llm.clear_device_cache()
            output = llm.generate(f"{INSTRUCTIONS}{DOCUMENTS[name]}{question}", params, hints=hints if hinted else None)
            return output.metrics.loaded_tokens

        for name in DOCUMENTS:
            ask(name, ASKED[0])
        # Other work comes in between, of which nothing is used again.
        for number, question in enumerate(ASKED[1:]):
            llm.clear_device_cache()
            chatter = RequestHints(reuse="none") if hinted else None
            llm.generate(f"Note {number}. " + question * 3, params, hints=chatter)
        return sum(ask(name, "And in one word?") for name in DOCUMENTS)


def main() -> int:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    plain, hinted = run(model, hinted=False), run(model, hinted=True)
    print(f"loaded of the documents after other work: {plain} tokens without hints, {hinted} with them")
    return 0 if hinted > plain else 1


if __name__ == "__main__":
    sys.exit(main())
