"""Readers of traces: what they make of published files, and how they refuse others."""

import base64
import json
from pathlib import Path

import msgspec
import pytest

from kvtier.errors import ConfigError
from kvtier.replay import ReadOptions, read_trace
from kvtier.replay.trace import Prefixes, fold

TRACES = Path(__file__).parents[2] / "data/traces"
MOONCAKE, AZURE, AGENTS = TRACES / "mooncake_conversation.jsonl", TRACES / "azure_2023_conv.csv", TRACES / "agents"


# ---- numbering


def test_a_block_is_named_by_its_whole_prefix():
    prefixes = Prefixes()
    assert prefixes.chain("abc") == (0, 1, 2)
    assert prefixes.chain("abx") == (0, 1, 3)
    assert prefixes.chain("bc") == (4, 5)
    assert prefixes.chain("abc") == (0, 1, 2)
    assert len(prefixes) == 6


def test_folding_keeps_or_drops_what_is_not_full():
    assert fold([1, 2, 3, 4, 5], 2, partial=True) == [(1, 2), (3, 4), (5,)]
    assert fold([1, 2, 3, 4, 5], 2, partial=False) == [(1, 2), (3, 4)]
    assert fold([1, 2], 1, partial=False) == [1, 2]


# ---- Mooncake


def test_mooncake_agrees_with_the_file_line_by_line():
    rows = [json.loads(line) for line in MOONCAKE.read_text().splitlines()]
    trace = read_trace(MOONCAKE)
    assert (trace.kind, trace.block_tokens, len(trace.requests)) == ("mooncake", 512, len(rows))
    assert [request.tokens for request in trace.requests] == [row["input_length"] for row in rows]
    assert [request.at for request in trace.requests] == [row["timestamp"] / 1000 for row in rows]
    # The file's ids name prefixes, so ours must be a renaming of them.
    renamed = {}
    for request, row in zip(trace.requests, rows, strict=True):
        for ours, theirs in zip(request.blocks, row["hash_ids"], strict=True):
            assert renamed.setdefault(theirs, ours) == ours
    assert len(set(renamed.values())) == len(renamed) == trace.blocks
    assert trace.touches == sum(len(row["hash_ids"]) for row in rows)


def test_mooncake_in_larger_blocks():
    small, large = read_trace(MOONCAKE), read_trace(MOONCAKE, ReadOptions(block_tokens=2048))
    assert large.tokens == small.tokens
    assert [len(request.blocks) for request in large.requests] == [-(-len(r.blocks) // 4) for r in small.requests]


def test_limit_takes_the_first_requests():
    assert read_trace(MOONCAKE, ReadOptions(limit=7)).requests == read_trace(MOONCAKE).requests[:7]
    assert len(read_trace(AGENTS, ReadOptions(limit=7)).requests) == 7
    assert len(read_trace(AZURE, ReadOptions(limit=7)).requests) == 7


# ---- coding agents


def test_sessions_of_agents_are_laid_over_each_other():
    files = [json.loads(path.read_text()) for path in sorted(AGENTS.glob("*.json"))]
    trace = read_trace(AGENTS)
    assert trace.kind == "agents"
    assert trace.tokens == sum(turn["in"] for file in files for turn in file["requests"])
    for file in files:
        turns = [request for request in trace.requests if request.session == file["id"]]
        assert [request.ends_session for request in turns] == [False] * (len(turns) - 1) + [True]
        gaps = [request.at - turns[0].at for request in turns]
        assert gaps == pytest.approx([turn["t"] - file["requests"][0]["t"] for turn in file["requests"]])
        assert [len(request.blocks) for request in turns] == [len(turn["hash_ids"]) // 8 for turn in file["requests"]]
    assert len({request.session for request in trace.requests[:6]}) > 1 or len(trace.requests) < 6
    assert read_trace(AGENTS) == trace
    assert read_trace(AGENTS, ReadOptions(seed=1)) != trace


def test_only_the_equally_long_tools_part_is_shared_between_sessions():
    trace = read_trace(AGENTS)
    blocks = {
        session: {block for request in trace.requests if request.session == session for block in request.blocks}
        for session in ("trace_0167", "trace_0302", "trace_0333")
    }
    assert blocks["trace_0302"] & blocks["trace_0333"] == set(trace_prefix(trace, "trace_0302", 12439 // 512))
    assert not blocks["trace_0167"] & blocks["trace_0302"]


def trace_prefix(trace, session, count):
    return next(request for request in trace.requests if request.session == session).blocks[:count]


def test_one_session_alone_keeps_its_own_time(tmp_path):
    trace = read_trace(AGENTS / "trace_0167.json")
    assert trace.requests[0].at == json.loads((AGENTS / "trace_0167.json").read_text())["requests"][0]["t"]
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_bytes((AGENTS / "trace_0167.json").read_bytes())
    assert len(read_trace(tmp_path).requests) == len(trace.requests), "an exact duplicate is dropped"


def test_sub_agents_are_part_of_their_session(tmp_path):
    inner = [{"t": 5, "type": "n", "in": 130, "out": 1, "hash_ids": [7, 8]}]
    turns = [
        {"t": 0, "type": "n", "in": 128, "out": 1, "hash_ids": [1, 2]},
        {"t": 4, "type": "subagent", "requests": inner},
        {"t": 9, "type": "n", "in": 200, "out": 1, "hash_ids": [1, 2, 3]},
    ]
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"id": "a", "block_size": 64, "tool_tokens": 0, "requests": turns}))
    trace = read_trace(file, ReadOptions(block_tokens=64))
    assert [(request.at, request.blocks) for request in trace.requests] == [(0, (0, 1)), (5, (2, 3)), (9, (0, 1, 4))]
    assert [request.ends_session for request in trace.requests] == [False, False, True]


# ---- Azure


def test_azure_requests_share_nothing_and_the_trace_says_so():
    trace = read_trace(AZURE)
    assert trace.touches == trace.blocks
    assert "lengths only" in trace.notes[0]
    assert trace.requests[0].at == 0
    assert trace.requests[1].at == pytest.approx(50.995169 - 46.68059, abs=1e-6)
    assert trace.requests[2].tokens == 879


def test_azure_sessions_are_made_up_only_when_asked_for():
    trace = read_trace(AZURE, ReadOptions(sessions=20))
    assert "made up" in trace.notes[0]
    assert trace.blocks < trace.touches
    longest = {}
    for request in trace.requests:
        assert request.tokens >= longest.get(request.session, 0), "a turn repeats all of the turn before it"
        longest[request.session] = request.tokens


# ---- KV events


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list
    parent_block_hash: object
    token_ids: list[int]
    block_size: int = 16
    lora_id: int | None = None
    medium: str | None = "GPU"


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list
    medium: str | None = "GPU"


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    pass


def stored(hashes, parent=None, **more):
    return BlockStored(hashes, parent, [5] * 16 * len(hashes), **more)


BATCHES = [
    Batch(100.0, [stored([11, 12])]),
    Batch(101.0, [stored([13], 12), stored([14], 13), stored([21, 22])], 0),
    Batch(102.5, [BlockRemoved([14]), stored([11], medium="CPU")]),
    Batch(103.0, [AllBlocksCleared(), stored([92, 93], 91)]),
    Batch(104.0, [stored([300_000_000_000], 93), stored([14], 13)]),
]
CHAINS = [
    (0.0, (0, 1), 32),
    (1.0, (0, 1, 2, 3), 64),
    (1.0, (4, 5), 32),
    (3.0, (6, 7, 8), 48),
    (4.0, (6, 7, 8, 9), 64),
    (4.0, (0, 1, 2, 3), 64),
]


@pytest.mark.parametrize("encode", [msgspec.json.encode, msgspec.msgpack.encode], ids=["json", "msgpack"])
def test_events_become_prompts_by_their_parents(tmp_path, encode):
    file = tmp_path / "events"
    end = b"\n" if encode is msgspec.json.encode else b""
    file.write_bytes(b"".join(encode(batch) + end for batch in BATCHES))
    trace = read_trace(file)
    assert (trace.kind, trace.block_tokens) == ("events", 16)
    assert [(request.at, request.blocks, request.tokens) for request in trace.requests] == CHAINS
    assert "1 prefixes were stored before" in trace.notes[1]


def test_events_with_hashes_that_are_bytes(tmp_path):
    file = tmp_path / "events"
    batches = [Batch(1.0, [stored([bytes(32), bytes([1] * 32)])]), Batch(2.0, [stored([b"x" * 300], bytes([1] * 32))])]
    file.write_bytes(b"".join(map(msgspec.msgpack.encode, batches)))
    as_json = tmp_path / "events.jsonl"
    as_json.write_bytes(b"\n".join(map(msgspec.json.encode, batches)))
    assert base64.b64encode(bytes(32)) in as_json.read_bytes()
    assert read_trace(file).requests == read_trace(as_json).requests
    assert [request.blocks for request in read_trace(file).requests] == [(0, 1), (0, 1, 2)]


# ---- what is refused


def written(tmp_path, text):
    file = tmp_path / "trace"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n'
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a Mooncake JSONL file"),
        ("hello\n", "trace:1: hello: expected a Mooncake JSONL file"),
        (GOOD + "{", "trace:2: {: expected a request such as"),
        (GOOD + GOOD.replace("600", '"600"'), "trace:2: {"),
        (GOOD + GOOD.replace("600", "1600"), "trace:2: input_length 1600 with 2 hash_ids: expected"),
        (GOOD + GOOD.replace("5,", "4,", 1), "trace:2: timestamp 4: expected at least 5"),
        (HEAD, "expected"),
        (HEAD + "2023-11-16 18:15:46.68,374\n", "trace:2: 2023-11-16 18:15:46.68,374: expected"),
        (HEAD + "yesterday,374,44\n", "trace:2: yesterday,374,44: expected"),
        (HEAD + "2023-11-16 18:15:46.68,0,44\n", "trace:2: 2023-11-16 18:15:46.68,0,44: expected at least one"),
        ('{"id": "a", "block_size": 64, "requests": [{"in": 3}]}', "trace: "),
        ('{"id": "a", "block_size": 0, "requests": [{"t": 3, "in": 4}]}', "block_size [0]: expected one size"),
        ('[1.5, [["BlockStored", [1], null, [], 16]]]\n[2.5, [["BlockLost", [1]]]]\n', "trace:2: ['BlockLost', [1]]"),
        ('[1.5, [["BlockStored", [], null, [], 16]]]\n', "trace:1: ['BlockStored', []"),
        ('[1.5, [["BlockStored", [{}], null, [], 16]]]\n', "block hashes that are numbers"),
        ('["x", []]\n', "trace:1: ['x', []]: expected a batch"),
        ("[1.5, [\n", "trace:1: "),
        (msgspec.msgpack.encode(BATCHES[0])[:-3], "trace:1: "),
        (b"{\xff", "expected"),
    ],
)
def test_a_bad_trace_is_one_line_that_names_place_value_and_expectation(tmp_path, text, says):
    with pytest.raises(ConfigError) as error:
        read_trace(written(tmp_path, text))
    assert says in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "expected" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_block_size_that_the_trace_cannot_have_is_refused():
    with pytest.raises(ConfigError, match="block-tokens 700: this trace names blocks of 512 tokens"):
        read_trace(MOONCAKE, ReadOptions(block_tokens=700))
    with pytest.raises(ConfigError, match="block-tokens 100: this trace names blocks of 64 tokens"):
        read_trace(AGENTS, ReadOptions(block_tokens=100))
    with pytest.raises(ConfigError, match="limit 0: expected at least 1"):
        ReadOptions(limit=0)


def test_a_file_that_is_not_there_and_an_empty_directory(tmp_path):
    with pytest.raises(ConfigError, match="gone: No such file"):
        read_trace(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"no \*.json file"):
        read_trace(tmp_path)


def test_sessions_are_not_made_up_for_traces_that_know_better():
    with pytest.raises(ConfigError, match="sessions 3: only traces of lengths"):
        read_trace(MOONCAKE, ReadOptions(sessions=3))
