"""Any sequence of verbs over HTTP against a dict."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rest_world import KEYS, block, digest, match, put_stream, running, stream, unstream

keys = st.sampled_from(KEYS[:5])
bodies = st.builds(block, st.integers(0, 3), st.integers(1, 5000))

puts = st.tuples(st.just("put"), keys, bodies, st.booleans(), st.booleans())
batches = st.tuples(
    st.just("puts"), st.lists(st.tuples(keys, bodies), min_size=1, max_size=4, unique_by=lambda one: one[0])
)
gets = st.tuples(st.just("get"), keys)
ranges = st.tuples(st.just("range"), keys, st.integers(0, 6000), st.integers(0, 6000))
reads = st.tuples(st.just("gets"), st.permutations(KEYS[:5]), st.booleans())
matches = st.tuples(st.just("match"), st.permutations(KEYS[:5]))
deletes = st.tuples(st.just("delete"), st.lists(keys, min_size=1, max_size=2, unique=True))
clears = st.tuples(st.just("clear"))


class Model:
    """The same verbs, over a dict and over a service."""

    def __init__(self, http):
        self.http = http
        self.blocks = {}

    def path(self, key):
        return f"/v1/namespaces/n/blocks/{key}"

    def put(self, key, body, first, chunked):
        headers = {"If-None-Match": "*"} if first else {}
        content = iter([body[:7], body[7:]]) if chunked else body
        answer = self.http.put(self.path(key), content=content, headers={**headers, "KVTier-Digest": digest(body)})
        expected = (412 if first else 200) if key in self.blocks else 201
        assert answer.status_code == expected
        self.blocks.setdefault(key, body)

    def puts(self, records):
        answer = put_stream(self.http, "n", stream([({"key": key}, body) for key, body in records]))
        assert answer.json() == {"outcomes": ["exists" if key in self.blocks else "stored" for key, _ in records]}
        for key, body in records:
            self.blocks.setdefault(key, body)

    def get(self, key):
        for method in ("GET", "HEAD"):
            answer = self.http.request(method, self.path(key))
            assert answer.status_code == (200 if key in self.blocks else 404)
            if key in self.blocks:
                assert answer.headers["KVTier-Digest"] == digest(self.blocks[key])
                assert int(answer.headers["Content-Length"]) == len(self.blocks[key])
                assert answer.content == (self.blocks[key] if method == "GET" else b"")

    def range(self, key, first, last):
        answer = self.http.get(self.path(key), headers={"Range": f"bytes={first}-{last}"})
        if key not in self.blocks:
            assert answer.status_code == 404
        elif last < first:
            assert (answer.status_code, answer.content) == (200, self.blocks[key])
        elif first >= len(self.blocks[key]):
            assert answer.status_code == 416
        else:
            assert (answer.status_code, answer.content) == (206, self.blocks[key][first : last + 1])

    def run_of(self, asked):
        return asked[: next((at for at, key in enumerate(asked) if key not in self.blocks), len(asked))]

    def gets(self, asked, each):
        answer = self.http.post("/v1/namespaces/n/blocks:get", json={"keys": asked, "each": each})
        expected = [key for key in asked if key in self.blocks] if each else self.run_of(asked)
        assert [(head.key, body) for head, body in unstream(answer.content)] == [
            (key, self.blocks[key]) for key in expected
        ]

    def match(self, asked):
        answer = match(self.http, "n", keys=asked)
        assert answer.json()["blocks"] == len(self.run_of(asked))

    def delete(self, asked):
        answer = self.http.post("/v1/namespaces/n/blocks:delete", json={"keys": asked})
        assert answer.json() == {"deleted": sum(key in self.blocks for key in asked)}
        for key in asked:
            self.blocks.pop(key, None)

    def clear(self):
        assert self.http.post("/v1/namespaces/n:clear").status_code == 204
        self.blocks.clear()


@pytest.fixture(scope="module")
def served():
    with running() as rest:
        rest.http.post("/v1/namespaces", json={"name": "n"})
        yield rest


@settings(max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(puts | batches | gets | ranges | reads | matches | deletes | clears, max_size=12))
def test_it_behaves_as_a_dict(served, verbs):
    model = Model(served.http)
    model.clear()
    for verb, *arguments in verbs:
        getattr(model, verb)(*arguments)
    served.at_rest()
