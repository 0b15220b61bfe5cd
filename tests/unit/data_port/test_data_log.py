"""What the data port says of its requests in the access log: failures and new namespaces, none of what moves blocks."""

import logging
from pathlib import Path

import pytest
from data_world import World, blocks, chain

from kvtier.client.errors import Invalid, NotFound
from kvtier.wire.frames import Opcode
from kvtier.wire.messages import Match, Pinned


def test_refusals_and_new_namespaces_have_a_line_with_an_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvtier.service.access")
    world = World(tmp_path)
    try:
        with world.client() as client:
            client.create_namespace("n")
            keys = chain(2)
            client.put_many("n", blocks(keys))
            assert len(client.get_many("n", keys)) == 2
            with pytest.raises(NotFound):
                client.match("nobodys", keys)
            with pytest.raises(Invalid):
                client._ask(Opcode.PIN, Match("n", b"short"), Pinned, None)
    finally:
        world.close()
    lines = [record for record in caplog.records if record.name == "kvtier.service.access"]
    assert [(line.method, line.status, line.code) for line in lines] == [
        ("create", 200, None),
        ("match", 404, "unknown_namespace"),
        ("pin", 400, "invalid"),
    ]
    ids = [line.request_id for line in lines]
    assert len(set(ids)) == 3
    assert {name.rsplit("-", 1)[0] for name in ids} == {ids[0].rsplit("-", 1)[0]}
    assert {(line.tenant, line.token) for line in lines} == {("red", world.token["red"].split("_")[1])}
