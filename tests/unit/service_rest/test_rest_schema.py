"""The OpenAPI document against the service: schemathesis asks what the document allows, and what it does not."""

import json
import struct
from contextlib import suppress

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from patience import PATIENCE
from rest_world import LAYOUT, running
from schemathesis.checks import CHECKS

from kvtier.service.cache import Scope, Tokens
from kvtier.wire.blockstream import MEDIA_TYPE, STREAM_BEGIN, STREAM_END

# It never ends by itself; and after the other all else is refused.
APART = ["/v1/events", "/v1/admin/drain"]


DECIDED_BY_WHAT_IS_STORED = {412: "If-None-Match", 416: "Range", 422: "KVTier-Digest"}


def packed(blocks):
    data = STREAM_BEGIN
    for key, body in blocks:
        head = json.dumps({"key": key}).encode()
        data += struct.pack("<II", len(head), len(body)) + head + body
    return data + STREAM_END


blocks = st.tuples(st.binary(min_size=16, max_size=32).map(bytes.hex), st.binary(min_size=1, max_size=64))
schemathesis.openapi.media_type(MEDIA_TYPE, st.lists(blocks, min_size=1, max_size=3).map(packed))


@schemathesis.serializer(MEDIA_TYPE)
def _as_it_is(context, value):
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens") / "tokens.json"


@pytest.fixture(scope="module")
def authorized(tokens):
    """Headers of a caller who may do all: said with every request.

    Of those in its settings schemathesis lost sight now and then, and took the token for one that it had made up.
    """
    return {"Authorization": f"Bearer {Tokens.open(tokens).create('default', Scope)}"}


@pytest.fixture(scope="module")
def document(tokens, authorized):
    # A probe without a token is refused for that, and not because a busy machine was late with its head.
    with running(tokens=tokens, max_connections=512, idle_timeout=PATIENCE) as rest:
        with rest.client(authorized["Authorization"].removeprefix("Bearer ")) as http:
            for name, layout in (("smollm2", None), ("laid", LAYOUT)):
                assert http.post("/v1/namespaces", json={"name": name, "layout": layout}).status_code == 201
            yield schemathesis.openapi.from_url(f"{rest.url}/openapi.json", headers=authorized)
        rest.http.headers.update(authorized)
        rest.at_rest()


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_the_service_is_what_its_document_says(document, authorized, mode):
    asked = 0
    for operation in operations(document):
        strategy = operation.as_strategy(generation_mode=mode)

        @settings(max_examples=8, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
        @given(strategy)
        def asks(case):
            nonlocal asked
            asked += 1
            check(case, authorized)

        with suppress(Unsatisfiable):  # where nothing can be wrong
            asks()
    assert asked > 100


def test_the_edges_of_every_keyword(document, authorized):
    # Those of what is wrong are four times as many: at random they are met above.
    modes, config = [schemathesis.GenerationMode.POSITIVE], document.config.generation
    asked = 0
    for operation in operations(document):
        for case in document.iter_coverage_cases(operation, generation_modes=modes, generation_config=config):
            asked += 1
            check(case, authorized)
    assert asked > 250


def operations(document):
    return [found.ok() for found in document.exclude(path=APART).get_all_operations()]


def check(case, headers):
    """All of schemathesis' checks, as it comes."""
    response = case.call(headers=headers)
    left_out, sent = [], case.headers or {}
    # It finds no value for a header's pattern that has a `=`, and sends none. And what is stored, by an earlier case,
    # may decide: no document can tell which block is there, or how long it is.
    if sent.get("KVTier-Digest") == "" or sent.get(DECIDED_BY_WHAT_IS_STORED.get(response.status_code, "")):
        left_out = ["positive_data_acceptance"]
    # What the request itself allows may be too little for a busy machine.
    elif response.status_code == 504 and isinstance(case.body, dict) and case.body.get("timeout"):
        left_out = ["positive_data_acceptance", "not_a_server_error"]
    case.validate_response(response, headers=headers, excluded_checks=CHECKS.get_by_names(left_out))


def test_the_document_is_complete(document):
    raw = document.raw_schema
    assert raw["openapi"].startswith("3.1")
    for path, operations in raw["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert operation["summary"], where
            assert operation["description"], where
            for parameter in operation.get("parameters", ()):
                assert parameter["description"], (where, parameter["name"])
            statuses = set(operation["responses"])
            for status in statuses:
                content = operation["responses"][status].get("content", {}).get("application/json", {})
                assert not content or example_of(raw, content["schema"]) or content["examples"], (where, status)
            if path in ("/healthz", "/readyz"):
                assert "security" not in operation
                continue
            assert operation["security"] == [{"token": []}], where
            assert {"400", "401", "403", "431", "500", "503"} <= statuses, where
            for status in statuses - {"200", "201", "202", "204", "206", "304"}:
                content = operation["responses"][status]["content"]["application/json"]
                assert content["examples"], where
                assert content["schema"]["$ref"].endswith("/ErrorAnswer"), where
            if "requestBody" in operation:
                assert {"408", "413"} <= statuses, where
                for kind, content in operation["requestBody"]["content"].items():
                    assert kind != "application/json" or example_of(raw, content["schema"]), where


def example_of(raw, schema):
    name = schema["$ref"].rsplit("/", 1)[-1]
    return raw["components"]["schemas"][name].get("examples")
