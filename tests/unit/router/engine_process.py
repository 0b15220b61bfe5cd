"""A whole engine over the tiny model, in a process of its own: prints its URL, serves until it is killed.

engine_process.py EVENTS REPLAY SECONDS_PER_STEP
"""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from server_world import CHAT_TEMPLATE
from tiny_model import tiny_model

from kvtier import AsyncLLM, api
from kvtier.cli.logs import setup_logging
from kvtier.http.listening import listen
from kvtier.server.run import serve


def main(events: str, replay: str, seconds: str) -> None:
    loaded = tiny_model()
    loaded = replace(loaded, tokenizer=replace(loaded.tokenizer, chat_template=CHAT_TEMPLATE))
    forward = loaded.model.forward

    def slowly(*arguments: Any) -> Any:
        time.sleep(float(seconds))
        return forward(*arguments)

    loaded.model.forward = slowly
    api._load = lambda config: loaded
    config = {"events": {"endpoint": events, "replay_endpoint": replay}}
    tiering = {"host": {"capacity": "1MiB"}, "recompute_gate": False}
    setup_logging("warning", "text")
    with listen("127.0.0.1", 0) as taken:
        llm = AsyncLLM(tiering=tiering, config=config, num_blocks=256, block_size=4, max_running=4)
        print(f"http://127.0.0.1:{taken.getsockname()[1]}", flush=True)
        serve(llm, "tiny", taken)


if __name__ == "__main__":
    main(*sys.argv[1:])
