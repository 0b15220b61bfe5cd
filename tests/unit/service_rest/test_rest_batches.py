"""Many blocks in one call: streams in and out, match, delete, hint."""

import json
import time

import pytest
from rest_world import KEYS, LAYOUT_BYTES, block, chain, digest, error_of, match, put_stream, stream, unstream

from kvtier.keys import KEY_SCHEME, Chain, encode_extra
from kvtier.wire.blockstream import MEDIA_TYPE, STREAM_BEGIN, STREAM_END, BlockHead, record_head


@pytest.fixture(autouse=True)
def _empty(rest):
    for name in ("plain", "laid"):
        assert rest.http.post(f"/v1/namespaces/{name}:clear").status_code == 204


def call(rest, verb, body, ns="laid"):
    if verb == "match":
        return match(rest.http, ns, **body)
    return rest.http.post(f"/v1/namespaces/{ns}/blocks:{verb}", json=body)


def test_a_chain_there_and_back(rest):
    records = chain(8)
    put = put_stream(rest.http, "laid", stream(records))
    assert (put.status_code, put.json()) == (200, {"outcomes": ["stored"] * 8})
    got = call(rest, "get", {"keys": KEYS[:10]})
    assert got.headers["content-type"] == MEDIA_TYPE
    assert int(got.headers["content-length"]) == len(got.content)
    found = unstream(got.content)
    assert [(head.key, head.depth, head.parent, head.exact, body) for head, body in found] == [
        (head["key"], head["depth"], head["parent"], True, body) for head, body in records
    ]
    assert {head.tier for head, _ in found} == {"host"}
    assert all(f"xxh3-128={head.digest}" == digest(body) for head, body in found)
    assert put_stream(rest.http, "laid", stream(records[:2])).json() == {"outcomes": ["exists"] * 2}


def test_the_leading_run_or_whatever_is_there(rest):
    put_stream(rest.http, "plain", stream([({"key": KEYS[at]}, block(at)) for at in (0, 1, 3, 5)]))

    def found(**more):
        answer = call(rest, "get", {"keys": KEYS[:6], **more}, "plain")
        return [KEYS.index(head.key) for head, _ in unstream(answer.content)]

    assert found() == [0, 1]
    assert found(each=True) == [0, 1, 3, 5]
    nothing = call(rest, "get", {"keys": [KEYS[9]]}, "plain")
    assert nothing.content == STREAM_BEGIN + STREAM_END


def test_a_stream_comes_in_pieces_of_any_size(rest):
    data = stream(chain(3))
    pieces = [data[at : at + 777] for at in range(0, len(data), 777)]
    assert put_stream(rest.http, "laid", iter(pieces)).json() == {"outcomes": ["stored"] * 3}
    assert match(rest.http, "laid", keys=KEYS[:3]).json()["blocks"] == 3


def test_large_blocks_are_sent_from_where_they_lie(rest):
    records = [({"key": KEYS[at]}, block(at, 200_000 + at)) for at in range(2)]
    assert put_stream(rest.http, "plain", stream(records)).json() == {"outcomes": ["stored"] * 2}
    for _ in range(3):
        found = unstream(call(rest, "get", {"keys": KEYS[:2]}, "plain").content)
        assert [body for _, body in found] == [body for _, body in records]


def test_match_by_keys(rest):
    put_stream(rest.http, "laid", stream(chain(3)))
    assert match(rest.http, "laid", keys=KEYS[:5]).json() == {"blocks": 3, "tiers": ["host"] * 3, "keys": None}
    assert match(rest.http, "laid", keys=KEYS[3:]).json() == {"blocks": 0, "tiers": [], "keys": None}


def test_match_by_tokens(rest):
    tokens, extras = list(range(18)), {1: encode_extra([("mm", b"cat")])}
    named = Chain(4, extras)
    named.extend(tokens)
    keys = [key.hex() for key in named.keys]
    put_stream(rest.http, "laid", stream(chain(2, keys=keys)))
    body = {"tokens": tokens, "extras": {"1": extras[1].hex()}}
    assert match(rest.http, "laid", **body).json() == {"blocks": 2, "tiers": ["host"] * 2, "keys": keys}
    # Another picture is another prefix.
    assert match(rest.http, "laid", tokens=tokens).json()["blocks"] == 1
    assert error_of(match(rest.http, "plain", **body))["code"] == "wrong_layout"
    other = {"name": "other-scheme", "layout": None, "scheme": "vllm.sha256_cbor"}
    assert rest.http.post("/v1/namespaces", json=other).json()["scheme"] != KEY_SCHEME
    assert error_of(match(rest.http, "other-scheme", tokens=tokens))["code"] == "wrong_layout"


def test_a_match_names_its_namespace(rest):
    refused = rest.http.post("/v1/match", json={"keys": KEYS[:1]})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "namespace")
    assert error_of(match(rest.http, "nowhere", keys=KEYS[:1]))["code"] == "unknown_namespace"


def test_delete_and_what_descends(rest):
    put_stream(rest.http, "laid", stream(chain(4)))
    assert call(rest, "delete", {"keys": [KEYS[2], KEYS[9]]}).json()["deleted"] >= 1
    assert match(rest.http, "laid", keys=KEYS[:4]).json()["blocks"] == 2


def test_hints_change_no_answer(rest):
    hint = {"priority": 4.0, "ttl": 60.0, "reuse": "likely", "session": "chat-1"}
    records = [({**head, "hint": hint}, body) for head, body in chain(3)]
    data = STREAM_BEGIN + b"".join(packed(head, body) for head, body in records) + STREAM_END
    assert put_stream(rest.http, "laid", data).json() == {"outcomes": ["stored"] * 3}
    assert call(rest, "hint", {"keys": KEYS[:5], "dead_from_depth": 2}).status_code == 204
    assert call(rest, "hint", {"keys": KEYS[1:3], "first": 1, **hint}).status_code == 204
    assert rest.http.post("/v1/sessions/chat-1:end").status_code == 204
    assert match(rest.http, "laid", keys=KEYS[:3]).json()["blocks"] == 3


def packed(head, body):
    data = json.dumps(head).encode()
    return len(data).to_bytes(4, "little") + len(body).to_bytes(4, "little") + data + body


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("get", {}),
        ("get", {"keys": []}),
        ("get", {"keys": ["ab"]}),
        ("get", {"keys": [KEYS[0] + "\n"]}),
        ("get", {"keys": [1]}),
        ("get", {"keys": KEYS[0]}),
        ("get", {"keys": KEYS[:1], "parts": []}),
        ("get", {"keys": KEYS[:1], "parts": [0, 0]}),
        ("get", {"keys": KEYS[:1], "parts": [-1]}),
        ("get", {"keys": KEYS[:1], "each": 1}),
        ("get", {"keys": KEYS[:1], "timeout": 0}),
        ("get", {"keys": KEYS[:1], "timeout": "5"}),
        ("get", {"keys": KEYS[:1], "owner": "x"}),
        ("match", {}),
        ("match", {"keys": KEYS[:1], "namespace": None}),
        ("match", {"keys": KEYS[:1], "namespace": "../laid"}),
        ("match", {"keys": KEYS[:1], "tokens": [1]}),
        ("match", {"tokens": [-1]}),
        ("match", {"tokens": [2**32]}),
        ("match", {"tokens": ["1"]}),
        ("match", {"keys": KEYS[:1], "extras": {"0": "ab"}}),
        ("match", {"tokens": [1], "extras": {"x": "ab"}}),
        ("match", {"tokens": [1], "extras": {"0": "a"}}),
        ("delete", {"keys": None}),
        ("hint", {"keys": KEYS[:1], "priority": 0}),
        ("hint", {"keys": KEYS[:1], "reuse": "maybe"}),
        ("hint", {"keys": KEYS[:1], "session": "a/b"}),
    ],
)
def test_malformed_bodies(rest, verb, body):
    refused = call(rest, verb, body)
    assert (refused.status_code, error_of(refused)["code"]) == (400, "invalid")


def test_a_part_that_the_namespace_has_not(rest):
    refused = call(rest, "get", {"keys": KEYS[:1], "parts": [1]})
    assert (refused.status_code, error_of(refused)["code"]) == (404, "unknown_block")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"null", b"\xff", b"[" * 60_000, b'{"keys": NaN}'])
def test_hostile_json(rest, content):
    headers = {"Content-Type": "application/json"}
    refused = rest.http.post("/v1/namespaces/plain/blocks:get", content=content, headers=headers)
    assert (refused.status_code, error_of(refused)["code"]) == (400, "invalid")


@pytest.mark.parametrize(
    "content",
    [
        b'{"namespace": "plain", "keys": [' + b",".join([b'"zz"'] * 1_000_000) + b"]}",
        b'{"namespace": "plain", "tokens": [' + b",".join([b"-1"] * 1_000_000) + b"]}",
        b"{" + b",".join(b'"%d":1' % at for at in range(500_000)) + b"}",
        b'{"namespace": "plain", "tokens": [1], "extras": {%s}}' % b",".join(b'"%d":1' % at for at in range(500_000)),
    ],
    ids=["keys", "tokens", "fields", "extras"],
)
def test_of_millions_of_errors_one_is_told_in_little_time(rest, content):
    began = time.process_time()
    headers = {"Content-Type": "application/json"}
    refused = rest.http.post("/v1/match", content=content, headers=headers)
    assert (refused.status_code, error_of(refused)["code"]) == (400, "invalid")
    assert time.process_time() - began < 3


def test_too_many_at_once(rest):
    many = [f"{at:032x}" for at in range(8193)]
    for verb in ("get", "match", "delete", "hint"):
        refused = call(rest, verb, {"keys": many})
        assert (refused.status_code, error_of(refused)["code"]) == (413, "too_large"), verb
    tiny = stream([({"key": key}, b"x") for key in many])
    assert put_stream(rest.http, "plain", tiny).status_code == 413


BODY = block(0)
ONE = record_head(BlockHead(KEYS[0]), LAYOUT_BYTES) + BODY


@pytest.mark.parametrize(
    ("ns", "data", "status", "code"),
    [
        ("laid", b"", 400, "invalid"),
        ("laid", STREAM_BEGIN + STREAM_END, 400, "invalid"),
        ("laid", STREAM_BEGIN + ONE, 400, "invalid"),
        ("laid", STREAM_BEGIN + ONE[:-1], 400, "invalid"),
        ("laid", STREAM_BEGIN + ONE + STREAM_END + b"x", 400, "invalid"),
        ("laid", stream([({"key": KEYS[0]}, BODY), ({"key": KEYS[1]}, BODY + b"x")]), 409, "wrong_layout"),
        ("laid", stream([({"key": KEYS[0]}, BODY), ({"key": KEYS[1], "part": 1}, BODY)]), 409, "wrong_layout"),
        ("laid", stream([({"key": KEYS[0]}, BODY), ({"key": KEYS[1], "depth": 1}, BODY)]), 409, "conflict"),
        ("laid", stream([({"key": KEYS[0]}, BODY), ({"key": KEYS[1], "digest": "0" * 32}, BODY)]), 422, "wrong_digest"),
        ("plain", stream([({"key": KEYS[0]}, BODY), ({"key": KEYS[1]}, bytes(300_000))]), 413, "too_large"),
        ("plain", stream([({"key": key}, bytes(200_000)) for key in KEYS[:3]]), 413, "too_large"),
        ("nowhere", stream([({"key": KEYS[0]}, BODY)]), 404, "unknown_namespace"),
    ],
)
def test_of_a_stream_that_is_not_sound_nothing_is_stored(rest, ns, data, status, code):
    refused = put_stream(rest.http, ns, data)
    assert (refused.status_code, error_of(refused)["code"]) == (status, code)
    if ns != "nowhere":
        assert match(rest.http, ns, keys=KEYS[:1]).json()["blocks"] == 0


def test_a_put_is_called_by_its_type(rest):
    refused = rest.http.post("/v1/namespaces/laid/blocks:put", content=stream(chain(1)))
    assert error_of(refused)["param"] == "Content-Type"
