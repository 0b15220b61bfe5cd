"""`kvtier replay` as a user or a program calls it."""

import json
import sys
from pathlib import Path

import pytest

from kvtier.cli import main

TRACES = Path(__file__).parents[2] / "data/traces"
MOONCAKE = str(TRACES / "mooncake_conversation.jsonl")
BINDING = {
    "policy": str,
    "capacity_blocks": int,
    "hit_tokens": float,
    "saved_compute": float,
    "tiers": dict,
    "nvme_bytes_written": int,
}


@pytest.fixture(autouse=True)
def _isolated(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def run(capsys, *arguments):
    code = main(["replay", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys, *arguments):
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def assert_shape(row):
    assert {name: type(row[name]) for name in BINDING} == BINDING
    assert row["optimum_hit_tokens"] is None or 0 <= row["optimum_hit_tokens"] <= 1
    assert 0 <= row["hit_tokens"] <= 1
    assert sum(tier["hit_tokens"] for tier in row["tiers"].values()) == pytest.approx(row["hit_tokens"])


def test_one_capacity_is_one_object(capsys):
    row = run_json(capsys, MOONCAKE, "--capacity", 400, "--nvme", "50%", "--device", 20, "--write", "through")
    assert_shape(row)
    assert list(row["tiers"]) == ["device", "host", "nvme"]
    assert (row["policy"], row["capacity_blocks"], row["requests"]) == ("lru", 400, 160)
    assert row["nvme_bytes_written"] > 0
    assert row["nvme_bytes_written"] % row["block_bytes"] == 0
    assert row["optimum_hit_tokens"] >= row["hit_tokens"]


def test_several_capacities_are_runs(capsys):
    rows = run_json(capsys, MOONCAKE, "--capacity", "100,400", "--capacity", "64GiB", "--no-optimum")
    assert list(rows) == ["runs"]
    assert [row["capacity_blocks"] for row in rows["runs"]] == [100, 400, 1024]
    for row in rows["runs"]:
        assert_shape(row)
        assert row["optimum_hit_tokens"] is None


def test_rooms_may_be_shares_and_sizes_depend_on_the_model(capsys):
    row = run_json(capsys, MOONCAKE, "--capacity", "100%", "--limit", 20)
    assert row["requests"] == 20
    assert row["tiers"]["host"]["evicted"] == {}
    small = run_json(capsys, MOONCAKE, "--capacity", "1GiB", "--token-bytes", "64KiB", "--block-tokens", 1024)
    assert (small["capacity_blocks"], small["block_bytes"]) == (16, 64 << 20)


@pytest.mark.parametrize("policy", ["arc", "clock2", "s3fifo", "kvtier.policies.lru:LruPolicy"])
def test_every_policy_runs(capsys, policy):
    row = run_json(capsys, MOONCAKE, "--capacity", 300, "--policy", policy, "--hints", "half-wrong", "--seed", 3)
    assert row["policy"] == policy
    assert_shape(row)


def test_full_bytes_find_the_same(capsys):
    arguments = (MOONCAKE, "--capacity", 300, "--nvme", 5000, "--write", "through", "--limit", 60)
    plain = run_json(capsys, *arguments)
    full = run_json(capsys, *arguments, "--bytes", "--token-bytes", "8B")
    assert full["hit_tokens"] == pytest.approx(plain["hit_tokens"])
    assert full["block_bytes"] == 4096


def test_the_table_says_what_a_trace_cannot(capsys):
    code, out, err = run(capsys, TRACES / "azure_2023_conv.csv")
    assert (code, err) == (0, "")
    assert "optimum" in out
    assert "lengths only" in " ".join(out.split())
    made_up = run_json(capsys, TRACES / "azure_2023_conv.csv", "--sessions", 10, "--capacity", "100%")
    assert made_up["hit_tokens"] > run_json(capsys, TRACES / "azure_2023_conv.csv", "--capacity", "100%")["hit_tokens"]


def test_agents_and_a_picture(capsys, tmp_path):
    picture = tmp_path / "curve.png"
    rows = run_json(capsys, TRACES / "agents", "--capacity", "5%,20%", "--hints", "trace", "--plot", picture)
    assert len(rows["runs"]) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_missing_matplotlib_names_the_extra(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run(capsys, MOONCAKE, "--plot", tmp_path / "a.png")
    assert (code, out, err) == (2, "", "error: plot: matplotlib is missing: pip install 'kvtier[plot]'\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gone.jsonl"], "gone.jsonl: No such file or directory: expected a Mooncake JSONL file"),
        ([MOONCAKE, "--capacity", "many"], "capacity 'many': expected BLOCKS, SIZE or a share"),
        ([MOONCAKE, "--capacity", "1KiB"], "capacity '1KiB': less than one block of 64MiB"),
        ([MOONCAKE, "--plot", "curve.gif"], "plot curve.gif: expected a file name that ends in .png"),
        ([MOONCAKE, "--plot", "/nowhere/curve.png"], "plot /nowhere/curve.png: there is no directory /nowhere"),
        ([MOONCAKE, "--capacity", "x%"], "capacity 'x%': expected BLOCKS, SIZE or a share"),
        ([MOONCAKE, "--capacity", "0"], "capacity of 0 blocks: expected at least 1"),
        ([MOONCAKE, "--nvme", "8G"], "unknown unit 'G' (did you mean GiB or GB?)"),
        ([MOONCAKE, "--policy", "best"], "expected one of lru"),
        ([MOONCAKE, "--hints", "all"], "hints 'all': expected one of none, true, half-wrong, trace"),
        ([MOONCAKE, "--hints", "trace"], "names no sessions"),
        ([MOONCAKE, "--copies", "two"], "copies 'two': expected one of inclusive, exclusive"),
        ([MOONCAKE, "--write", "never"], "write 'never': expected one of through, leave, second_touch"),
        ([MOONCAKE, "--block-tokens", "100"], "block-tokens 100: this trace names blocks of 512 tokens"),
        ([MOONCAKE, "--limit", "0"], "limit 0: expected at least 1"),
        ([MOONCAKE, "--time-scale", "-1"], "time-scale -1: expected a factor above 0"),
        ([MOONCAKE, "--token-bytes", "0"], "token-bytes '0': expected at least one byte"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, says):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1


def test_a_damaged_trace_names_file_line_value_and_expectation(capsys, tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text(Path(MOONCAKE).read_text().splitlines()[0] + '\n{"timestamp": "now"}\n')
    code, out, err = run(capsys, file)
    assert (code, out) == (2, "")
    assert err.startswith(f'error: {file}:2: {{"timestamp": "now"}}: expected a request such as')
