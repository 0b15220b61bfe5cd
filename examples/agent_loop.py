"""An agent that calls tools: every turn finds the turns before it, and what it leaves goes when its session ends.

`session` says whose the blocks are, `end_of_session` that nobody will come back: what belongs to that session alone
leaves host first from then on, what other sessions share (the instructions) stays.

python examples/agent_loop.py [MODEL]
"""

import sys

from kvtier import LLM, RequestHints, SamplingParams

SYSTEM = (
    "You run a harbour office. Tools: tide(hour), crane(day), berth(length). Call one tool at a time, and say what you "
    "do in one line. When you know enough, answer. "
) * 3
RESULTS = ["tide(9) = 2.1 m", "crane(monday) = free", "berth(14) = outer pier"]


def open_sessions(llm: LLM) -> int:
    llm.flush()
    return llm.store.stats()["store"]["sessions"]


def run(llm: LLM, session: str) -> list[int]:
    """Loaded tokens of each turn: the device forgets in between, as if others had worked meanwhile."""
    text, loaded = f"{SYSTEM}\nTask of {session}: a boat of 14 m comes on Monday at nine.\n", []
    for turn, result in enumerate(RESULTS):
        hints = RequestHints(session=session, end_of_session=turn == len(RESULTS) - 1)
        output = llm.generate(text, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True), hints=hints)
        loaded.append(output.metrics.loaded_tokens)
        text += f"{output.text}\nTool: {result}\n"
        llm.clear_device_cache()
        print(f"{session}, turn {turn + 1}: {loaded[-1]} tokens loaded; open sessions: {open_sessions(llm)}")
    return loaded


def main() -> int:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    tiering = {"host": {"capacity": "256MiB"}, "recompute_gate": False}
    with LLM(model, tiering=tiering, num_blocks=64) as llm:
        turns = {session: run(llm, session) for session in ("alice", "bob")}
        left = open_sessions(llm)
    grows = all(first < second < third for first, second, third in turns.values())
    return 0 if grows and turns["alice"][0] == 0 < turns["bob"][0] and left == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
