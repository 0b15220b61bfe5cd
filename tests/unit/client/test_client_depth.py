"""From the middle of a chain: a tier that keeps several blocks per object finds them by how deep they lie."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_world import BYTES, LAYOUT, Service, blocks
from patience import until

from kvtier.client import AsyncClient, Client, ClientOptions
from kvtier.client.data import DataClient
from kvtier.config import ServiceSettings, TieringSettings
from kvtier.service.cache import LOCAL, Cache, Tokens

RUN, DEPTH = 4, 6
CHAIN = blocks(12)
KEYS = [block.key for block in CHAIN]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """What was put lies in three objects of four blocks, and not in host."""
    settings = ServiceSettings(state=tmp_path / "state", data_port=0, max_block="1MiB", max_batch="4MiB")
    remote = {"url": "memory:///", "options": f"run={RUN}", "absent_ttl": 0, "write": "through"}
    cache = Cache.open(settings, TieringSettings(host={"capacity": "4MiB"}, remote=remote))
    try:
        made = Service(cache, Tokens.open(None), settings)
        try:
            with Client(made.url) as client:
                client.create_namespace("n", LAYOUT)
                client.put_many("n", CHAIN)
            cache.flush()
            forget(made)
            yield made
        finally:
            made.stop()
    finally:
        cache.close()


def forget(service: Service) -> None:
    service.cache._tenants["default"].store.clear("host")


@pytest.mark.parametrize("way", ["never", "socket"])
def test_both_clients_say_how_deep_they_ask(service: Service, way: str) -> None:
    asked = KEYS[DEPTH:]
    with Client(service.url, options=ClientOptions(data=way)) as client:
        assert len(client.match("n", asked).tiers) < 6
        assert client.match("n", asked, depth=DEPTH).tiers == ("remote",) * 6
        found = client.get_many("n", asked, depth=DEPTH)
        assert [(one.key, one.depth, bytes(one.data)) for one in found] == [
            (one.key, one.depth, one.data) for one in CHAIN[DEPTH:]
        ]
        forget(service)
        assert fetched(client, client.prefetch("n", asked, depth=DEPTH)) == 6
        forget(service)

    async def awaited() -> Any:
        async with AsyncClient(service.url, options=ClientOptions(data=way)) as client:
            tiers = (await client.match("n", asked, depth=DEPTH)).tiers
            return tiers, await client.get_many("n", asked, depth=DEPTH), await client.prefetch("n", asked, depth=DEPTH)

    tiers, found, prefetch = asyncio.run(awaited())
    assert (tiers, len(found), prefetch.id != "") == (("remote",) * 6, 6, True)


def test_the_data_port_takes_a_prefetchs_depth(service: Service) -> None:
    with DataClient(service.data_address) as client:
        assert fetched(client, client.prefetch("n", KEYS[DEPTH:])) < 6
        assert fetched(client, client.prefetch("n", KEYS[DEPTH:], depth=DEPTH)) == 6
    assert service.cache.namespace(LOCAL, "n").host_bytes == 6 * BYTES


def fetched(client: Any, prefetch: Any) -> int:
    """Blocks in host once it is over."""
    until(lambda: client.prefetched(prefetch.id).state != "running")
    return client.prefetched(prefetch.id).blocks
