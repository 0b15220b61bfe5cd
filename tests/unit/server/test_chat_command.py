"""`kvtier chat` with what a pipe brings it: a model here, or a server."""

import io
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from patience import until
from server_world import RunningServer, slow_down, tiny_llm

from kvtier import api
from kvtier.cli import main
from kvtier.cli.chat_partners import LocalPartner, Style

GREEDY = ("--temperature", "0", "--max-tokens", "8")


@pytest.fixture
def talk(monkeypatch, capsys):
    def run(lines, *arguments):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = main(["chat", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def rows(out):
    return [
        [cell.strip().replace(",", "") for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line
    ]


def test_a_server_answers_and_the_prefix_is_found(server, talk):
    code, out, err = talk(["hello", "and again", "/stats", "/exit", "never"], "--url", server.url, *GREEDY)
    assert (code, err) == (0, "")
    first, second = rows(out)
    # user: hello\nassistant: - and nothing of it was there before.
    assert first[:5] == ["1", "22", "0", "0", "22"]
    assert int(second[1]) > 22
    assert int(second[2]) >= 20
    assert int(second[2]) + int(second[3]) + int(second[4]) == int(second[1])
    assert "never" not in out


def test_reset_forgets(server, talk):
    lines = ["one", "/reset", "one", "/stats"]
    _, out, _ = talk(lines, "--url", server.url + "/v1", *GREEDY)
    answer, said, again, *_ = out.splitlines()
    assert (answer, said) == (again, "(the conversation is forgotten)")
    ((turn, prompt, *_),) = rows(out)
    assert (turn, prompt) == ("1", "20")


def test_a_model_here_answers_as_the_server_does(server, talk, monkeypatch, tmp_path):
    lines = ["who are you?", "why?"]
    _, remote, _ = talk(lines, "--url", server.url, *GREEDY, "--system", "Be brief.")
    loaded = server.llm.model
    monkeypatch.setattr(api, "_load", lambda config: loaded)
    code, local, err = talk([*lines, "/stats"], str(tmp_path), *GREEDY, "--system", "Be brief.")
    assert (code, err) == (0, "")
    assert local.startswith(remote)
    first, second = rows(local)
    assert int(second[2]) > int(first[2]) == 0


def test_an_error_does_not_end_the_conversation(server, talk):
    code, out, err = talk(["x" * 400, "hi", "/nonsense", "/stats"], "--url", server.url, *GREEDY)
    assert code == 0
    assert re.match(r"error: http://\S+: 400: \d+ tokens of messages and 8 of output", err)
    assert "/reset: forget" in out
    assert len(rows(out)) == 1


def test_what_is_wrong_is_said(talk, server, monkeypatch):
    for url in ("ftp://x", "http://[::1", "h:port"):
        said = f"error: --url '{url}': expected something like http://127.0.0.1:8000\n"
        assert talk([], "--url", url)[::2] == (2, said)
    code, _, err = talk([], "--url", server.url, "--api-key", "geheim\r")
    assert (code, err.count("\n"), "geheim" in err) == (2, 1, False)
    assert "token or API key of 7 characters" in err
    code, _, err = talk([], "--url", "http://127.0.0.1:9")
    assert code == 2
    assert "is the server running there?" in err
    code, _, err = talk([], "model", "--url", server.url)
    assert code == 2
    assert "drop one" in err
    guarded = RunningServer(tiny_llm(monkeypatch), api_keys=["k"])
    try:
        assert "401: no valid API key" in talk([], "--url", guarded.url)[2]
        assert talk(["hi"], "--url", guarded.url, "--api-key", "k", *GREEDY)[0] == 0
    finally:
        guarded.stop()


def test_who_stops_listening_stops_the_answer(monkeypatch):
    llm = tiny_llm(monkeypatch)
    slow_down(monkeypatch, llm)
    partner = LocalPartner(llm, "tiny", Style(max_tokens=200, temperature=0.0, seed=None))
    try:
        answer = partner.answer([{"role": "user", "content": "hi"}])
        assert next(answer)
        assert llm.stats().running == 1
        answer.close()
        until(lambda: llm.stats().running == 0, seconds=15)
        assert partner.turn is None
    finally:
        partner.close()


class _Foreign(BaseHTTPRequestHandler):
    """Another server: it does not say where its cached tokens were, and its model tries to steer the terminal."""

    def do_GET(self):
        self._send("application/json", json.dumps({"data": [{"id": "other"}]}))

    def do_POST(self):
        chunk = {"choices": [{"index": 0, "delta": {"content": "\x1b[2Jhi\x9b31m there"}}]}
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
        data = [json.dumps(chunk), json.dumps({"choices": [], "usage": usage}), "[DONE]"]
        self._send("text/event-stream", ": ping\n\n" + "".join(f"data: {one}\n\n" for one in data))

    def _send(self, kind, body):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *arguments):
        pass


def test_another_server_will_do(talk):
    with HTTPServer(("127.0.0.1", 0), _Foreign) as foreign:
        thread = threading.Thread(target=foreign.serve_forever)
        thread.start()
        code, out, _ = talk(["hi", "/stats"], "--url", f"127.0.0.1:{foreign.server_port}")
        foreign.shutdown()
        thread.join()
    assert code == 0
    assert out.splitlines()[0] == "[2Jhi31m there"
    assert "cache" in out
    assert rows(out)[0][:4] == ["1", "9", "4", "5"]
