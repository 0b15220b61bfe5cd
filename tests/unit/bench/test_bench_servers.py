"""Servers of other makes, and servers that end: what a bench makes of what they send."""

import asyncio
import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import trustme
from patience import PATIENCE

from kvtier.bench import Load, Pace, Unrelated, figures, measure
from kvtier.bench.remote import RemoteOptions, RemoteTarget
from kvtier.bench.targets import Failed
from kvtier.cli import main
from kvtier.errors import ConfigError

TESTS = Path(__file__).parents[2]
SERVE = """
import sys, time
import pytest
from server_world import RunningServer, tiny_llm
server = RunningServer(tiny_llm(pytest.MonkeyPatch()))
print(server.url, flush=True)
time.sleep(600)
"""


def chunk(text, **more):
    return {"choices": [{"index": 0, "delta": {"content": text}}], **more}


def events(*told, end=True):
    rows = [f"data: {json.dumps(one, ensure_ascii=False)}" for one in told] + ["data: [DONE]"] * end
    return "".join(f"{row}\n\n" for row in rows).encode()


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}


class Foreign(BaseHTTPRequestHandler):
    """A server that says what its test wants it to say."""

    protocol_version = "HTTP/1.1"
    stream: bytes = events(chunk("hi"), chunk(" there"), USAGE)
    models: bytes = json.dumps({"data": [{"id": "one"}, {"id": "two"}]}).encode()
    status = 200
    pieces = 1
    silence = 0.0
    asked: ClassVar[list] = []

    def do_GET(self):
        self._send(200, self.models)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not asked.get("stream"):
            self._send(200, json.dumps({"choices": [], "usage": {"prompt_tokens": 20}}).encode())
            return
        self.asked.append((self.path, asked, dict(self.headers)))
        threading.Event().wait(self.silence)
        self._send(self.status, self.stream)

    def _send(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        size = max(1, -(-len(body) // self.pieces))
        for at in range(0, len(body), size):
            self.wfile.write(body[at : at + size])
            self.wfile.flush()

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def foreign(context: ssl.SSLContext | None = None, **said: object) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Saying", (Foreign,), said)) as server:
        server.daemon_threads = True
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"{'http' if context is None else 'https'}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def bench(url, requests=3, progress=lambda: None, **options):
    async def run():
        target = await RemoteTarget.open(url, RemoteOptions(**options))
        try:
            load = Load(
                Unrelated(requests=requests, prompt_tokens=10, output_tokens=4).scripts(Pace(), 0),
                concurrency=1,
                warm_up=0,
            )
            return await measure(target, load, progress)
        finally:
            await target.close()

    return asyncio.run(run())


def errors(run):
    return [sample.error for sample in run.samples]


@pytest.mark.parametrize("pieces", [1, 2, 7, 60])
def test_events_are_read_however_they_are_cut(pieces):
    said = [chunk("\u00fcber "), chunk("\u2028\u0085 \U0001f600"), chunk(""), USAGE]
    with foreign(stream=events(*said), pieces=pieces) as url:
        run = bench(url)
    assert errors(run) == [None] * 3
    assert all(len(sample.gaps) == 1 and sample.usage[:2] == (9, 3) for sample in run.samples)
    assert run.model == "one"


def test_comments_and_other_fields_are_no_events():
    stream = b": ping\n\nevent: x\r\nid: 4\r\n" + events(chunk("a")).replace(b"\n", b"\r\n")
    with foreign(stream=stream) as url:
        assert errors(bench(url)) == [None] * 3


def test_a_server_that_counts_nothing_will_do(capsys):
    with foreign(stream=events(chunk("a"), chunk("b"), chunk("c"))) as url:
        run = bench(url)
        assert main(["bench", url, "--requests", "2", "--workload", "random"]) == 0
    assert [sample.output_tokens for sample in run.samples] == [3, 3, 3]
    out = capsys.readouterr().out
    assert "reports no usage" in out
    assert "prompt tokens/s" not in out


def test_a_server_that_does_not_say_what_it_found_is_told_how(capsys):
    with foreign() as url:
        assert main(["bench", url, "--requests", "2", "--workload", "random"]) == 0
    out = capsys.readouterr().out
    assert "--enable-prompt-tokens-details" in out
    assert "tokens, found" not in out


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_of_a_reasoning_model_are_tokens_and_no_history(name):
    thought = {"choices": [{"index": 0, "delta": {name: "hm"}}]}
    asked: list = []
    with foreign(stream=events(thought, chunk("yes"), USAGE), asked=asked) as url:
        (sample, *_) = bench(url).samples
        assert main(["bench", url, "--chats", "1", "--turns", "2", "--warm-up", "0"]) == 0
    assert len(sample.gaps) == 1
    assert asked[-1][1]["messages"][1] == {"role": "assistant", "content": "yes"}


def test_who_says_why_it_ends_need_not_say_done():
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    with foreign(stream=events(chunk("a"), last, end=False)) as url:
        assert errors(bench(url)) == [None] * 3


def test_a_password_in_the_url_is_sent_and_not_shown():
    with foreign() as url:
        run = bench(url.replace("//", "//me:secret@"))
    assert (errors(run), run.place) == ([None] * 3, url)


def test_tokens_without_text_are_an_answer():
    with foreign(stream=events(chunk(""), USAGE)) as url:
        (sample, *_) = bench(url).samples
    assert (sample.error, sample.ttft) == (None, sample.latency)


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        ({"stream": events(chunk("a"), {"error": {"message": "out of memory"}})}, "stream_error", "out of memory"),
        ({"stream": events(chunk("a"), {"error": "no"})}, "stream_error", "no"),
        ({"stream": events(chunk("a"), end=False)}, "interrupted", "broke off"),
        ({"stream": events()}, "empty", "nothing in it"),
        ({"stream": b"data: {oops\n\n"}, "protocol", "{oops"),
        ({"stream": b"data: [1]\n\n"}, "protocol", "expected an OpenAI-compatible server"),
        ({"status": 429, "stream": b'{"error": {"message": "full"}}'}, "http_429", "429: full"),
        ({"status": 500, "stream": b"<html>"}, "http_500", "500: <html>"),
        ({"status": 502, "stream": b""}, "http_502", "without a word"),
        ({"status": 400, "stream": b'{"message": "too long", "object": "error"}'}, "http_400", "too long"),
    ],
)
def test_failures_have_a_kind(said, kind, message):
    with foreign(**said) as url:
        run = bench(url)
    assert errors(run) == [kind] * 3
    assert message in run.samples[0].message
    assert {row.params["kind"]: row.value for row in figures(run) if row.params} == {kind: 3}


def test_a_server_that_falls_silent_is_not_waited_for():
    with foreign(silence=3.0) as url:
        run = bench(url, requests=1, timeout=0.2)
    assert errors(run) == ["timeout"]


def test_what_a_server_says_does_not_steer_the_terminal(capsys):
    said = {"status": 400, "stream": b'{"error": {"message": "\\u001b[2Jno\\u009b1m"}}'}
    models = json.dumps({"data": [{"id": "\x1b[31mred"}]}).encode()
    with foreign(models=models, **said) as url:
        assert main(["bench", url, "--requests", "1", "--workload", "random", "--warm-up", "0"]) == 1
        assert main(["bench", url, "--model", "other"]) == 2
        assert main(["bench", url]) == 2
    told = "".join(capsys.readouterr())
    assert "[2Jno" in told
    assert "[31mred" in told
    assert not [char for char in told if not char.isprintable() and char != "\n"]


def test_all_failed_is_an_exit_code(capsys):
    with foreign(status=500, stream=b"{}") as url:
        arguments = ["bench", url, "--requests", "2", "--workload", "random", "--warm-up", "0"]
        assert main(arguments) == 1
        assert "failed, http_500: 2, the first: " in capsys.readouterr().out
        assert main([*arguments, "--json"]) == 1
        (target,) = json.loads(capsys.readouterr().out)["targets"]
    assert (target["planned"], target["answered"]) == (2, 0)


@pytest.mark.parametrize("beside", ["http://127.0.0.1:9", "ftp://x", "small"])
def test_a_second_server_that_will_not_do_is_said_before_the_first_is_asked(capsys, beside):
    asked: list = []
    small = json.dumps({"data": [{"id": "small", "max_model_len": 100}]}).encode()
    with foreign(asked=asked) as url, foreign(models=small) as other:
        assert main(["bench", url, "--compare", other if beside == "small" else beside]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), asked) == ("", 1, [])
    assert beside in err


def test_what_ends_a_comparison_leaves_what_was_measured(capsys):
    with foreign() as url, foreign(status=500, stream=b'{"error": {"message": "boom"}}') as other:
        arguments = ["bench", url, "--compare", other, "--workload", "random", "--requests", "2"]
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert main([*arguments, "--json"]) == 2
    assert f"one at {url}: 2 of 6 requests in " in out
    assert err == f"error: {other}: 500: boom\n"
    told = json.loads(capsys.readouterr().out)
    (target,) = told["targets"]
    assert (target["answered"], target["interrupted"], told["results"][0]["peer"]) == (2, True, None)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_turn_is_sent_behind_what_was_said_and_answered(endpoint):
    said = (
        events(chunk("hi "), chunk("there\n"), USAGE) if endpoint == "chat" else events({"choices": [{"text": "hi"}]})
    )
    asked: list = []
    with foreign(stream=said, asked=asked) as url:
        arguments = ["--chats", "1", "--turns", "3", "--warm-up", "0", "--endpoint", endpoint, "--api-key", "k"]
        more = ["--ignore-eos", "--extra-body", '{"priority": 1}', "--model", "two", "--output-tokens", "7", "--hints"]
        assert main(["bench", url, *arguments, *more, "--seed", "3"]) == 0
    bodies = [body for _, body, _ in asked]
    fixed = {"model": "two", "max_tokens": 7, "temperature": 0, "ignore_eos": True, "priority": 1, "stream": True}
    assert all(fixed.items() <= body.items() for body in bodies)
    assert all(headers["Authorization"] == "Bearer k" for _, _, headers in asked)
    assert [body["kv_hints"]["end_of_session"] for body in bodies] == [False, False, True]
    if endpoint == "chat":
        assert [path for path, _, _ in asked] == ["/v1/chat/completions"] * 3
        assert [one["role"] for one in bodies[2]["messages"]] == ["user", "assistant"] * 2 + ["user"]
        assert {one["content"] for one in bodies[2]["messages"] if one["role"] == "assistant"} == {"hi there\n"}
        assert bodies[2]["messages"][:3] == bodies[1]["messages"]
    else:
        assert [path for path, _, _ in asked] == ["/v1/completions"] * 3
        assert bodies[1]["prompt"].startswith(bodies[0]["prompt"] + "hi\n")
        assert bodies[2]["prompt"].startswith(bodies[1]["prompt"] + "hi\n")


@pytest.mark.parametrize("models", [b"{}", b"[]", b"<html>", b'{"data": []}', b'{"data": [7]}'])
def test_what_is_no_such_server_is_said(models):
    with foreign(models=models) as url, pytest.raises((ConfigError, Failed), match="OpenAI-compatible server"):
        bench(url)


def test_over_tls_the_authority_counts(tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with foreign(context) as url:
        assert errors(bench(url, ca_file=tmp_path / "ca.pem")) == [None] * 3
        with pytest.raises(Failed, match="certificate"):
            bench(url)
    with pytest.raises(ConfigError, match="ca_file"):
        bench("https://127.0.0.1:9", ca_file=tmp_path / "none.pem")


def test_a_server_that_dies_midway_leaves_its_figures():
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            url = process.stdout.readline().strip()
            ended = 0

            def progress():
                nonlocal ended
                ended += 1
                if ended == 5:
                    os.kill(process.pid, signal.SIGKILL)
                    process.wait(PATIENCE)

            run = bench(url, requests=12, progress=progress)
        finally:
            process.kill()
    assert errors(run)[:5] == [None] * 5
    # The connection that was kept is found broken first.
    assert set(errors(run)[5:]) <= {"unreachable", "interrupted"}
    assert errors(run)[-1] == "unreachable"
    assert (len(run.samples), run.interrupted) == (12, False)
    found = {figure.name: figure.value for figure in figures(run) if not figure.params}
    assert (found["bench.requests.answered"], found["bench.requests.failed"]) == (5, 7)
    assert found["bench.ttft.p50"] > 0
