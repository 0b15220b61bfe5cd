"""One process of the demo: runs phases of questions and reports each answer as a JSON line on stdout.

`python -m kvtier.cli.demo_session` reads its orders, one JSON object, from stdin; when it is through it says so
and waits to be killed.
"""

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import kvtier
from kvtier.engine import RequestOutput, SamplingParams
from kvtier.errors import KVTierError

__all__ = ["Answer", "Orders", "main"]


@dataclass(frozen=True, slots=True)
class Orders:
    """What a session is to do: `config` overrides, the prompts, and the phases to run them through."""

    config: dict[str, Any]
    document: str
    questions: list[str]
    phases: list[str]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One question's outcome in one phase. bytes_moved: into the device, by the tier they were found in."""

    phase: str
    question: int
    token_ids: list[int]
    text: str
    prompt_tokens: int
    tokens_reused: int
    tokens_computed: int
    ttft_s: float
    load_s: float
    bytes_moved: dict[str, int]


class _Session:
    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        # By attribute: `kvtier demo`, which takes what is defined here, needs no torch itself.
        self.llm = kvtier.LLM(config=orders.config)
        self.params = SamplingParams(max_tokens=orders.max_tokens, temperature=0.0)
        # The first forward pass of a process pays for set-up that belongs to no phase.
        self.llm.generate("Warm up.", SamplingParams(max_tokens=2))
        self._prepare = {
            "cold": self._forget_everything,
            "device": lambda: None,
            "host": self._forget_device,
            "nvme": self._forget_host,
            "nvme-after-kill": self._forget_host,
        }

    def run(self, phase: str) -> None:
        for number, question in enumerate(self.orders.questions):
            # Each question finds the shared document in exactly one place.
            self._prepare[phase]()
            emit("answer", asdict(self._ask(phase, number, question)))

    def _ask(self, phase: str, number: int, question: str) -> Answer:
        messages = [{"role": "user", "content": f"{self.orders.document}\n\n{question}"}]
        before = self.llm.loaded_bytes()
        output: RequestOutput = self.llm.chat(messages, self.params)
        after = self.llm.loaded_bytes()
        measured = output.metrics
        return Answer(
            phase=phase,
            question=number,
            token_ids=list(output.token_ids),
            text=output.text,
            prompt_tokens=output.prompt_tokens,
            tokens_reused=measured.cached_tokens + measured.loaded_tokens,
            tokens_computed=measured.computed_tokens,
            ttft_s=measured.ttft,
            load_s=measured.load_seconds,
            bytes_moved={tier: after[tier] - before[tier] for tier in after},
        )

    def _forget_device(self) -> None:
        self.llm.clear_device_cache()

    def _forget_host(self) -> None:
        self.llm.flush()
        self.llm.clear_device_cache()
        self.llm.clear_tier("host")

    def _forget_everything(self) -> None:
        self.llm.flush()
        self.llm.clear_device_cache()
        self.llm.clear_tier(None)


def emit(kind: str, payload: object) -> None:
    """One JSON line to whoever started this process."""
    sys.stdout.write(json.dumps({"kind": kind, "payload": payload}) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Entry point."""
    orders = Orders(**json.loads(sys.stdin.readline()))
    try:
        session = _Session(orders)
        for phase in orders.phases:
            emit("phase", phase)
            session.run(phase)
        session.llm.flush()
    except KVTierError as error:
        emit("error", str(error))
        return
    emit("done", None)
    # Stays alive with every tier open: the parent kills it, or lets it end by closing stdin.
    sys.stdin.read()


if __name__ == "__main__":
    main()
