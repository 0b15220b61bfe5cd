"""Two engines, one cache service: what the first computed, the second loads. Exits with 1 where it does not.

python examples/shared_daemon.py [MODEL]
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvtier import LLM, SamplingParams

DOCUMENT = (
    "Harbour rules. Boats longer than twelve metres moor at the outer pier. Visitors register at the office before "
    "noon. Fires are allowed on the east beach only. The crane is free on weekdays between eight and ten. "
) * 6
QUESTIONS = {"first": "Where do long boats moor?", "second": "When is the crane free?"}


def serve(socket: Path) -> subprocess.Popen[bytes]:
    """The cache service, as `kvtier cache serve` starts it; it is ready once its socket is there."""
    command = [sys.executable, "-c", "from kvtier.cli import main; main()", "cache", "serve"]
    options = ["--port", "0", "--data-port", "none", "--socket", str(socket), "--capacity", "256MiB"]
    daemon = subprocess.Popen([*command, *options])
    while not socket.exists() and daemon.poll() is None:
        time.sleep(0.05)
    return daemon


def ask(model: str | None, url: str, name: str) -> int:
    """An engine that has nothing of its own but a little host memory; tokens that it loaded."""
    tiering = {"host": {"capacity": "64MiB"}, "remote": {"url": url}, "recompute_gate": False}
    prompt = f"{DOCUMENT}\nQuestion: {QUESTIONS[name]}\nAnswer:"
    with LLM(model, tiering=tiering, num_blocks=64) as llm:
        output = llm.generate(prompt, SamplingParams(max_tokens=8, temperature=0.0))
        llm.flush()
    found = output.metrics
    print(f"{name} engine: {found.loaded_tokens} tokens came from the service, {found.computed_tokens} computed")
    return found.loaded_tokens


def main() -> int:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as directory:
        socket = Path(directory) / "kvtier.sock"
        daemon = serve(socket)
        try:
            first, second = (ask(model, f"kvtier://{socket}", name) for name in QUESTIONS)
        finally:
            daemon.terminate()
            daemon.wait(60)
    return 0 if first == 0 < second else 1


if __name__ == "__main__":
    sys.exit(main())
