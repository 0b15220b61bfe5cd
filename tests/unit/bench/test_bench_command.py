"""`kvtier bench` against the bundled server and an engine here, as a user or a program calls it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE, until
from server_world import RunningServer, slow_down, tiny_llm

from kvtier import api
from kvtier.bench import Load, Pace, Unrelated, measure
from kvtier.bench.local import LocalTarget
from kvtier.cli import main

TRACES = Path(__file__).parents[2] / "data/traces"
CHATS = ("--chats", "4", "--turns", "3", "--prompt-tokens", "60", "--turn-tokens", "8", "--output-tokens", "4")
SHORT = ("--workload", "random", "--requests", "3", "--prompt-tokens", "20", "--output-tokens", "3")


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = main(["bench", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def run_json(run):
    def call(*arguments):
        code, out, err = run(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return call


def by_name(told):
    return {row["name"]: row for row in told["results"] if not row["params"]}


def test_later_turns_find_what_the_first_ones_left(server, run_json):
    told = run_json(server.url, *CHATS, "--seed", 1, "--ignore-eos", "--concurrency", 1)
    (target,) = told["targets"]
    assert (target["model"], target["place"], target["planned"], target["answered"]) == ("tiny", server.url, 12, 12)
    assert (told["seed"], target["interrupted"]) == (1, False)
    found = by_name(told)
    assert found["bench.requests.answered"]["value"] == 12
    assert found["bench.requests.failed"]["value"] == 0
    # The template's first words are everybody's: less than one block of the first turns.
    assert found["bench.tokens.cached.first"]["value"] < 0.1
    assert found["bench.tokens.cached.later"]["value"] > 0.6
    assert found["bench.tokens.output.rate"]["value"] == pytest.approx(12 * 4 / target["seconds"])
    for name in ("ttft", "ttft.first", "ttft.later", "tpot", "latency"):
        values = [found[f"bench.{name}.{statistic}"]["value"] for statistic in ("p50", "p90", "p99")]
        assert 0 < values[0] <= values[1] <= values[2] <= target["seconds"]
    assert all(row["peer"] is None for row in told["results"])


def test_the_same_seed_is_found_and_another_one_is_not(server, run_json):
    def share(seed):
        told = run_json(server.url, *SHORT, "--seed", seed, "--warm-up", 0)
        return by_name(told)["bench.tokens.cached"]["value"]

    assert share(21) < 0.5
    assert share(21) > 0.8
    assert share(22) < 0.5


def test_without_a_seed_every_run_is_new(server, run_json):
    first, second = (run_json(server.url, *SHORT) for _ in range(2))
    assert first["seed"] != second["seed"]
    assert by_name(second)["bench.tokens.cached"]["value"] < 0.5


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_lengths_hold_for_a_tokenizer_of_bytes(server, run_json, endpoint):
    before = server.llm.stats()
    told = run_json(
        server.url, "--workload", "random", "--requests", 10, "--prompt-tokens", 100, "--output-tokens", 4,
        "--endpoint", endpoint, "--warm-up", 0, "--ignore-eos", "--seed", len(endpoint),
    )  # fmt: skip
    after = server.llm.stats()
    rate, (target,) = by_name(told)["bench.tokens.prompt.rate"]["value"], told["targets"]
    template = 17 if endpoint == "chat" else 0
    assert rate * target["seconds"] / 10 == pytest.approx(100 + template, rel=0.15)
    assert after.computed_tokens > before.computed_tokens + 800


def test_shared_documents_are_found(server, run_json):
    told = run_json(
        server.url, "--workload", "shared-prefix", "--documents", 2, "--questions", 3, "--prompt-tokens", 80,
        "--turn-tokens", 6, "--output-tokens", 2, "--concurrency", 1,
    )  # fmt: skip
    found = by_name(told)
    assert found["bench.tokens.cached.first"]["value"] < 0.3 < 0.6 < found["bench.tokens.cached.later"]["value"]


def test_a_trace_is_asked_at_its_own_times(server, run_json):
    told = run_json(
        server.url, "--trace", TRACES / "mooncake_conversation.jsonl", "--limit", 6, "--length-scale", 0.01,
        "--time-scale", 20, "--ignore-eos", "--slo", "ttft=60s",
    )  # fmt: skip
    (target,) = told["targets"]
    lines = [json.loads(line) for line in (TRACES / "mooncake_conversation.jsonl").read_text().splitlines()[:6]]
    assert target["answered"] == 6
    assert target["seconds"] >= lines[-1]["timestamp"] / 1000 / 20
    found = by_name(told)
    assert found["bench.goodput.share"]["value"] == 1
    assert found["bench.late.p50"]["value"] >= 0
    wanted = sum(max(1, round(line["output_length"] * 0.01)) for line in lines)
    assert found["bench.tokens.output.rate"]["value"] * target["seconds"] == pytest.approx(wanted)


def test_a_rate_spaces_the_starts(server, run_json):
    told = run_json(server.url, *SHORT, "--rate", 10, "--arrivals", "fixed")
    assert told["targets"][0]["seconds"] >= 0.2


def test_hints_reach_the_server(server, run_json, monkeypatch):
    sessions = []
    generate = server.llm.generate

    def noted(prompt, params=None, *, hints=None):
        sessions.append(hints and (hints.session, hints.end_of_session))
        return generate(prompt, params, hints=hints)

    monkeypatch.setattr(server.llm, "generate", noted)
    arguments = ("--chats", 2, "--turns", 2, "--prompt-tokens", 20, "--output-tokens", 2, "--turn-tokens", 4)
    run_json(server.url, *arguments, "--hints", "--warm-up", 0, "--concurrency", 1, "--seed", 7)
    hinted = [one for one in sessions if one is not None and one[0] is not None]
    expected = [(f"bench-7-chat-{chat}", ended) for chat in (0, 1) for ended in (False, True)]
    assert sorted(hinted) == expected


def test_two_passes_over_one_server_are_a_comparison(server, run_json):
    told = run_json(server.url, *SHORT, "--compare", server.url, "--concurrency", 1)
    assert told["rounds"] == 3
    assert [(target["planned"], target["answered"]) for target in told["targets"]] == [(9, 9), (9, 9)]
    cached = by_name(told)["bench.tokens.cached"]
    assert cached["peer"] == server.url
    assert cached["value"] < 0.5 < 0.8 < cached["peer_value"]
    ttft = by_name(told)["bench.ttft.p50"]
    assert ttft["ratio"] == pytest.approx(ttft["peer_value"] / ttft["value"])
    low, high = ttft["interval"]
    assert 0 < low < ttft["ratio"] < high


def test_an_engine_here_with_tiers_and_without(server, run_json, monkeypatch, tmp_path):
    loaded = server.llm.model
    monkeypatch.setattr(api, "_load", lambda config: loaded)
    # Room on the device for one chat: what comes back has been pushed out.
    monkeypatch.setenv("KVTIER_ENGINE__NUM_BLOCKS", "48")
    monkeypatch.setenv("KVTIER_ENGINE__BLOCK_SIZE", "4")
    monkeypatch.setenv("KVTIER_ENGINE__MAX_RUNNING", "1")
    monkeypatch.setenv("KVTIER_TIERING__HOST__CAPACITY", "4MiB")
    monkeypatch.setenv("KVTIER_TIERING__NVME__PATH", str(tmp_path / "nvme"))
    monkeypatch.setenv("KVTIER_TIERING__RECOMPUTE_GATE", "false")
    told = run_json(
        *CHATS,
        "--model",
        tmp_path,
        "--compare",
        "untiered",
        "--concurrency",
        1,
        "--hints",
        "--ignore-eos",
        "--rounds",
        2,
    )
    assert [target["place"] for target in told["targets"]] == ["engine", "engine without tiers"]
    assert [target["answered"] for target in told["targets"]] == [24, 24]
    found = by_name(told)
    later = found["bench.tokens.cached.later"]
    assert later["value"] > 0.6
    assert later["peer_value"] < 0.2
    assert found["bench.tokens.loaded.later"]["value"] > 0.5
    assert found["bench.tokens.loaded.later"]["peer_value"] == 0


def test_people_get_tables(server, run):
    code, out, err = run(server.url, *CHATS, "--slo", "ttft=60s,tpot=60s", "--seed", 3)
    assert (code, err) == (0, "")
    assert "4 chats of 3 turns: 60 tokens, then 8 more each time, answers of 4; seed 3" in out
    assert f"tiny at {server.url}: 12 of 12 requests in " in out
    rows = {cells[0]: cells[1:] for cells in (re.split(r"\s*│\s*", line)[1:-1] for line in out.splitlines()) if cells}
    assert set(rows) >= {"TTFT", "TTFT, first turns", "TTFT, later turns", "TPOT", "latency", "requests/s"}
    assert len(rows["TTFT"]) == 4
    assert rows["share within the limits"] == ["100.0 %"]
    assert float(rows["later turns"][0].removesuffix(" %")) > 50
    assert "limits: ttft at most 60000 ms, tpot at most 60000 ms" in out


def test_people_get_tables_of_two(server, run):
    code, out, _ = run(server.url, *SHORT, "--compare", server.url, "--rounds", 2)
    assert code == 0
    assert "; 2 rounds\n" in out
    assert out.count("6 of 6 requests") == 2
    number = r"[\d.]+"
    assert re.search(rf"TTFT +│ p50 │ +{number} │ +{number} │ +{number} x │ +{number} to {number} │", out)
    assert "95 %: between these a ratio lies" in out


def test_one_round_says_that_it_is_no_proof(server, run):
    code, out, _ = run(server.url, *SHORT, "--compare", server.url, "--rounds", 1)
    assert code == 0
    assert "One round of both: how much of a ratio is chance is not known. --rounds 3, or more, tells." in out
    assert " to " not in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--workload", "chats"],
            "--workload 'chats': expected one of conversations, shared-prefix, random, or --trace",
        ),
        (
            ["--workload", "random", "--chats", 3],
            "--chats 3: not of random, which has --prompt-tokens, --output-tokens, --spread, --requests",
        ),
        (["--time-scale", 3], "--time-scale 3.0: not of conversations"),
        (["--trace", "x", "--workload", "random"], "drop one"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
        (["--trace", TRACES / "mooncake_conversation.jsonl", "--spread", 0.5], "--spread 0.5: not of a trace"),
        (["--trace", TRACES / "mooncake_conversation.jsonl", "--rate", 2], "a trace has its own times"),
        (["--slo", "ttft=5"], "slo 'ttft=5': expected such as"),
        (["--rate", 0], "rate 0"),
        (["--arrivals", "burst"], "arrivals 'burst'"),
        (["--concurrency", 0], "concurrency 0: expected at least 1"),
        (["--warm-up", -1], "warm-up -1"),
        (["--rounds", 0], "rounds 0: expected at least 1"),
        (["--turns", 0], "turns 0: expected at least 1"),
        (["--endpoint", "chat"], "--endpoint chat: of a server, and no URL is given"),
        (["--extra-body", "{}"], "--extra-body {}: of a server, and no URL is given"),
        (["--compare", "http://127.0.0.1:9"], "without URL expected untiered"),
        (["http://127.0.0.1:9", "--compare", "untiered"], "expected the URL of another server"),
        (
            ["http://127.0.0.1:9", "--endpoint", "embeddings"],
            "endpoint 'embeddings': expected one of chat, completions",
        ),
        (["http://127.0.0.1:9", "--extra-body", "[1]"], "--extra-body '[1]': expected a JSON object"),
        (["http://127.0.0.1:9", "--extra-body", "{"], "--extra-body '{':"),
        (["http://127.0.0.1:9", "--extra-body", '{"top_p": NaN}'], "JSON is malformed"),
        (["http://127.0.0.1:9", "--extra-body", "\udcff"], "surrogates not allowed"),
        (["http://127.0.0.1:9", "--api-key", "k\r"], "token or API key of 2 characters: one of them cannot be sent"),
        (["http://127.0.0.1:9", "--timeout", 0], "timeout 0: expected seconds"),
        (["http://127.0.0.1:9"], "http://127.0.0.1:9: All connection attempts failed"),
        (["ftp://x"], "url 'ftp://x': expected http://host:port"),
        (["http://[::1"], "url 'http://[::1'"),
    ],
)
def test_what_is_wrong_is_one_line(run, arguments, expected):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert expected in err
    assert err.count("\n") == 1


def test_a_missing_package_is_told_how_to_get(run, monkeypatch):
    monkeypatch.delitem(sys.modules, "kvtier.bench.remote", raising=False)
    monkeypatch.setitem(sys.modules, "httpx", None)
    said = "error: bench: httpx is missing: pip install 'kvtier[client]'\n"
    assert run("http://127.0.0.1:9") == (2, "", said)


def test_models_keys_and_lengths_are_looked_at_first(server, run, monkeypatch):
    code, out, err = run(server.url, "--model", "huge")
    assert (code, out, err) == (2, "", f"error: model 'huge': {server.url} has tiny; name one of these, or none\n")
    code, _, err = run(server.url, "--prompt-tokens", 5000, "--seed", 0)
    assert code == 2
    assert "the longest prompt and its answer have 5320 tokens, more than tiny's context of 256" in err
    guarded = RunningServer(tiny_llm(monkeypatch), api_keys=["k"])
    try:
        code, _, err = run(guarded.url, *SHORT)
        assert (code, err.count("\n")) == (2, 1)
        assert "401: no valid API key" in err
        assert run(guarded.url, *SHORT, "--api-key", "k")[0] == 0
    finally:
        guarded.stop()


def test_what_a_server_refuses_is_counted(server, run):
    # The first turns fit; the later ones do only without the template, of which the bench knows nothing.
    code, out, _ = run(
        server.url, "--chats", 2, "--turns", 2, "--prompt-tokens", 205, "--turn-tokens", 30, "--output-tokens", 8,
        "--ignore-eos", "--warm-up", 0, "--seed", 8,
    )  # fmt: skip
    assert code == 0
    assert re.search(r"failed, http_400: 2, the first: http://\S+: 400: \d+ tokens of messages and 8 of output", out)


def test_ctrl_c_prints_what_was_measured_so_far(monkeypatch):
    server = RunningServer(tiny_llm(monkeypatch))
    hurry = slow_down(monkeypatch, server.llm)
    # Whose parents ignore the signal, as those of background jobs do, ignores it too.
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    start += "from kvtier.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "bench", server.url, "--workload", "random", "--requests", "5000"]
    command += ["--prompt-tokens", "10", "--output-tokens", "2", "--ignore-eos", "--warm-up", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)

    def answered():
        found = re.search(
            r'requests_total\{path="/v1/chat/completions",status="200"\} (\d+)', server.get("/metrics").text
        )
        return found and int(found[1]) >= 8

    try:
        until(answered)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        hurry.set()
        server.stop()
    assert process.returncode == 130
    assert err == "interrupted\n"
    found = re.search(r"(\d+) of 5000 requests in [\d.]+ s, interrupted", out)
    assert 2 <= int(found[1]) < 5000
    assert "TTFT" in out
    assert "failed" not in out


def test_an_engine_here_is_at_rest_after_an_interruption(monkeypatch):
    llm = tiny_llm(monkeypatch)
    hurry = slow_down(monkeypatch, llm)

    async def interrupted():
        ended = asyncio.Event()
        load = Load(
            Unrelated(requests=50, prompt_tokens=10, output_tokens=3).scripts(Pace(), 0), concurrency=2, warm_up=0
        )
        target = LocalTarget(llm, "tiny", "here", ignore_eos=True)
        task = asyncio.create_task(measure(target, load, ended.set))
        await ended.wait()
        task.cancel()
        run = await task
        hurry.set()
        until(lambda: llm.stats().running + llm.stats().waiting == 0)
        await target.close()
        return run

    run = asyncio.run(interrupted())
    assert run.interrupted
    assert 1 <= len(run.samples) < 50
    assert [sample.error for sample in run.samples] == [None] * len(run.samples)
