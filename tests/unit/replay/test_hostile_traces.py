"""Traces that are damaged on purpose, and rooms that are none: one line, no traceback, no memory eaten."""

from pathlib import Path

import pytest

from kvtier.cli.main import main
from kvtier.errors import ConfigError
from kvtier.policies import make_policy
from kvtier.replay import read_trace

TURNS = '{"id": "a", "block_size": 64, "requests": '
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "nested hundreds deep"),
        (TURNS + '[{"t": 0, "in": 64, "requests": ' * 3000 + "[]" + "}]" * 3000 + "}", "nested hundreds deep"),
        ("[1" + "0" * 400 + ', [["BlockStored", [1], null, [1], 16]]]', "expected a batch such as"),
        (AZURE + "99999999999999,44\n", "at most 16777216"),
        ("\x1b[2Jjunk\x07", "\ufffd[2Jjunk\ufffd"),
    ],
    ids=["deep events", "deep session", "late batch", "endless prompt", "terminal control"],
)
def test_a_hostile_trace_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_trace(path)
    assert says in str(error.value)
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize("room", ["inf%", "nan%", "-5%", "²", "9" * 5000, "0%"])
def test_a_room_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], room: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 512, "output_length": 9, "hash_ids": [0]}\n')
    assert main(["replay", str(path), f"--capacity={room}"]) == 2
    assert "error: capacity" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["json:loads", "builtins:print", "builtins:int", "os:getcwd"])
def test_what_is_no_policy_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="expected a class of kvtier"):
        make_policy(name, 4)
