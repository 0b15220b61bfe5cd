"""The OpenAPI document against the service: schemathesis asks what the document allows, and what it does not."""

import json
import struct
from contextlib import suppress

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from rest_world import LAYOUT, running
from schemathesis.checks import CHECKS

from kvtier.service.cache import Scope, Tokens
from kvtier.wire.blockstream import MEDIA_TYPE, STREAM_BEGIN, STREAM_END

# It never ends by itself; and after the other all else is refused.
APART = ["/v1/events", "/v1/admin/drain"]

# What no schema can say: a part, a ttl or a quota beyond this service's own limits, tokens without a layout, no such
# tenant, a parent without a depth.
REFUSES = {
    "set_capacity",
    "set_policy",
    "history",
    "match_blocks",
    "get_blocks",
    "pin",
    "put_block",
    "put_blocks",
    "create_namespace",
}


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
def document(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens.json"
    secret = Tokens.open(path).create("default", Scope)
    with running(tokens=path, max_connections=64) as rest:
        with rest.client(secret) as http:
            for name, layout in (("smollm2", None), ("laid", LAYOUT)):
                assert http.post("/v1/namespaces", json={"name": name, "layout": layout}).status_code == 201
            config = schemathesis.Config.from_dict({"headers": {"Authorization": f"Bearer {secret}"}})
            yield schemathesis.openapi.from_url(f"{rest.url}/openapi.json", config=config)
        rest.http.headers["Authorization"] = f"Bearer {secret}"
        rest.at_rest()


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_the_service_is_what_its_document_says(document, mode):
    asked = 0
    for found in document.exclude(path=APART).get_all_operations():
        operation = found.ok()
        strategy = operation.as_strategy(generation_mode=mode)

        @settings(max_examples=8, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
        @given(strategy)
        def asks(case):
            nonlocal asked
            asked += 1
            check(case)

        with suppress(Unsatisfiable):  # where nothing can be wrong
            asks()
    assert asked > 100


def check(case):
    response = case.call()
    assert response.status_code in (503, 504, 507) or response.status_code < 500
    left_out = {"not_a_server_error"}
    refuses = case.operation.definition.raw["operationId"] in REFUSES and response.status_code == 400
    if refuses or response.status_code in (412, 413, 416, 422, 503, 504, 507):
        left_out.add("positive_data_acceptance")
    case.validate_response(response, excluded_checks=CHECKS.get_by_names(sorted(left_out)))


def test_the_document_is_complete(document):
    raw = document.raw_schema
    assert raw["openapi"].startswith("3.1")
    for path, operations in raw["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert operation["summary"], where
            assert operation["description"], where
            statuses = set(operation["responses"])
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
    return raw["components"]["schemas"][name]["examples"]
