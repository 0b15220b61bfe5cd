"""Every verb of both clients against the real service, over every way that block bytes can go."""

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import xxhash
from client_world import BYTES, LAYOUT, Service, blocks, serving

from kvtier.client import AsyncClient, Block, Client, ClientOptions
from kvtier.client.errors import Conflict, Interrupted, Invalid, NotFound, TooLarge
from kvtier.client.results import PutOutcome
from kvtier.errors import ConfigError
from kvtier.hints import Hint
from kvtier.keys import Chain

STORED, EXISTS = PutOutcome.STORED, PutOutcome.EXISTS
WAYS = {"rest": "never", "data": "socket", "unix": "socket", "shared memory": "auto"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("service")) as service:
        yield service


class Waited:
    """An `AsyncClient` whose calls are waited for."""

    def __init__(self, url: str, options: ClientOptions) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(url, options=options)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if not inspect.iscoroutinefunction(found):
            return found
        return lambda *arguments, **named: self._runner.run(found(*arguments, **named))

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


@pytest.fixture(
    params=[(kind, way) for kind in (Client, Waited) for way in WAYS], ids=lambda pair: pair[1] + pair[0].__name__
)
def client(request: pytest.FixtureRequest, service: Service) -> Iterator[Any]:
    kind, way = request.param
    service.forget()
    options = ClientOptions(data=WAYS[way])
    made = kind(service.url, options=options)
    if way == "data":
        # As from another machine, where no Unix socket is tried.
        ways = (made if kind is Client else made._client)._ways
        offers = ways._addresses
        ways._addresses = lambda offer: [address for address in offers(offer) if not address.startswith("unix:")]
    made.create_namespace("n", LAYOUT)
    yield made
    if made.way != "rest" or way == "rest":
        assert made.way == way
    made.close()
    service.rest.at_rest()


def test_blocks_come_back_as_they_were_put(client: Any) -> None:
    chain = blocks(6)
    keys = [block.key for block in chain]
    assert client.put("n", chain[0]) is STORED
    assert client.put_many("n", chain) == [EXISTS, *[STORED] * 5]
    assert client.match("n", [*keys, b"?" * 32]).tiers == ("host",) * 6
    found = client.get_many("n", [*keys, b"?" * 32])
    assert [bytes(one.data) for one in found] == [block.data for block in chain]
    assert [(one.key, one.part, one.depth, one.exact, one.tier) for one in found] == [
        (key, 0, depth, True, "host") for depth, key in enumerate(keys)
    ]
    # The service knows the first 16 bytes of a parent.
    assert [one.parent and one.parent[:16] for one in found] == [None, *[key[:16] for key in keys[:-1]]]
    one = client.get("n", keys[3])
    assert bytes(one.data) == chain[3].data
    assert client.get("n", b"?" * 32) is None


def test_the_leading_run_ends_at_a_hole_and_each_does_not(client: Any) -> None:
    chain = blocks(5)
    keys = [block.key for block in chain]
    client.put_many("n", [chain[0], chain[1]])
    client.put_many("n", [Block(block.key, block.data) for block in chain[3:]])
    assert [one.key for one in client.get_many("n", keys)] == keys[:2]
    assert [one.key for one in client.get_many("n", keys, each=True)] == [*keys[:2], *keys[3:]]
    assert client.get_many("n", keys[2:]) == []


def test_what_descends_from_a_deleted_block_goes_with_it(client: Any) -> None:
    chain = blocks(4)
    keys = [block.key for block in chain]
    client.put_many("n", chain)
    assert client.delete("n", [keys[2]]) == 1
    assert client.delete("n", [keys[2]]) == 0
    assert len(client.match("n", keys).tiers) == 2
    assert client.get("n", keys[3]) is None


def test_head_tells_what_get_would_send(client: Any) -> None:
    (block,) = blocks(1)
    client.put("n", block)
    head, found = client.head("n", block.key), client.get("n", block.key)
    assert (head.nbytes, head.exact, head.depth, head.tier) == (BYTES, True, 0, "host")
    assert head.digest == xxhash.xxh3_128_digest(block.data)
    assert found.digest in (head.digest, b"")  # nothing travels through shared memory
    assert client.head("n", b"?" * 32) is None


def test_prompts_match_by_their_tokens(client: Any) -> None:
    tokens = list(range(18))
    chain = Chain(LAYOUT.block_size)
    chain.extend(tokens)
    data = bytes(BYTES)
    client.put_many(
        "n",
        [
            Block(key, data, depth=at, parent=chain.keys[at - 1] if at else None)
            for at, key in enumerate(chain.keys[:3])
        ],
    )
    match = client.match_tokens("n", tokens)
    assert match.keys == tuple(chain.keys)
    assert match.tiers == ("host",) * 3
    assert client.match_tokens("n", tokens, {0: b"image"}).tiers == ()


def test_lossy_blocks_are_for_who_asks_for_them(client: Any) -> None:
    (block,) = blocks(1)
    client.put("n", block._replace(exact=False))
    assert client.match("n", [block.key]).tiers == ()
    assert client.get("n", block.key) is None
    assert client.match("n", [block.key], lossy=True).tiers == ("host",)
    found = client.get("n", block.key, lossy=True)
    assert (bytes(found.data), found.exact) == (block.data, False)


def test_opaque_namespaces_take_blocks_of_any_size(client: Any) -> None:
    made = client.create_namespace("bytes")
    assert (made.layout, made.parts, made.block_bytes) == (None, 1, ())
    chain = [block._replace(data=block.data * at) for at, block in enumerate(blocks(9), 1)]
    assert client.put_many("bytes", chain) == [STORED] * 9
    found = client.get_many("bytes", [block.key for block in chain])
    assert [bytes(one.data) for one in found] == [block.data for block in chain]


def test_refusals_say_why(client: Any) -> None:
    (block,) = blocks(1)
    with pytest.raises(NotFound) as caught:
        client.put("nowhere", block)
    assert (caught.value.status, caught.value.code) == (404, "unknown_namespace")
    with pytest.raises((Conflict, Invalid)):
        client.put("n", block._replace(data=b"short"))
    client.create_namespace("bytes")
    # A server that hangs up within a body may do so before its words are read.
    with pytest.raises((TooLarge, Interrupted)):
        client.put("bytes", block._replace(data=bytes((1 << 20) + 1)))
    with pytest.raises(Conflict):
        client.create_namespace("n")


def test_empty_batches_ask_nobody(client: Any) -> None:
    assert client.put_many("n", []) == []
    assert client.get_many("n", []) == []
    assert client.match("n", []).tiers == ()
    assert client.delete("n", []) == 0


def test_hints_travel_with_blocks(client: Any, service: Service) -> None:
    chain = blocks(2)
    client.put_many("n", [block._replace(hint=Hint(session="s", reuse="likely")) for block in chain])
    client.put("n", blocks(1, seed=3)[0]._replace(hint=Hint(session="s")))
    sessions = service.cache._tenants["default"].store.stats()["store"]["sessions"]
    assert sessions == 1
    client.hint("n", [block.key for block in chain], Hint(session="s"), first=0, dead_from_depth=1)
    client.end_session("s")
    assert service.cache._tenants["default"].store.stats()["store"]["sessions"] == 0


# ---- verbs that always go over REST: once is enough


@pytest.fixture(params=[Client, Waited], ids=["sync", "async"])
def plain(request: pytest.FixtureRequest, service: Service) -> Iterator[Any]:
    service.forget()
    made = request.param(service.url, ClientOptions()) if request.param is Waited else Client(service.url)
    made.create_namespace("n", LAYOUT)
    yield made
    made.close()


def test_pins_and_prefetches(plain: Any, service: Service) -> None:
    chain = blocks(3)
    keys = [block.key for block in chain]
    plain.put_many("n", chain)
    pin = plain.pin("n", keys, 60.0)
    assert pin.blocks == 3
    assert plain.tenants()[0]["pins"] == 1
    plain.unpin(pin.id)
    plain.unpin(pin.id)
    assert plain.tenants()[0]["pins"] == 0
    prefetch = plain.prefetch("n", keys)
    assert plain.prefetched(prefetch.id).state in ("running", "done")
    plain.cancel(prefetch.id)
    for gone in (prefetch.id, "none"):
        with pytest.raises(NotFound):
            plain.prefetched(gone)
    plain.cancel("none")


def test_namespaces(plain: Any) -> None:
    made = plain.create_namespace("m", LAYOUT, model="w", numerics="f", lora="a", scheme="other")
    assert plain.create_namespace("m", LAYOUT, model="w", numerics="f", lora="a", scheme="other") == made
    assert (made.name, made.layout, made.model, made.numerics, made.lora, made.scheme) == (
        "m",
        LAYOUT,
        "w",
        "f",
        "a",
        "other",
    )
    assert (made.fingerprint, made.parts, made.block_bytes) == (LAYOUT.fingerprint, 1, (BYTES,))
    plain.put_many("m", blocks(3))
    assert plain.namespace("m").counts["stored"] == 3
    assert [one.name for one in plain.namespaces()] == ["m", "n"]
    plain.clear_namespace("m")
    assert plain.match("m", [block.key for block in blocks(3)]).tiers == ()
    plain.drop_namespace("m")
    plain.drop_namespace("m")
    with pytest.raises(NotFound):
        plain.namespace("m")


def test_the_whole(plain: Any, service: Service) -> None:
    stats = plain.stats()
    assert stats["tenants"][0]["name"] == "default"
    before = plain.tenants()[0]["quotas"]["host"]
    assert plain.set_capacity("default", "host", 1 << 21) == 1 << 21
    assert plain.tenants()[0]["quotas"]["host"] == 1 << 21
    plain.set_capacity("default", "host", before)
    plain.set_policy("default", "arc")
    plain.flush()
    assert set(plain.compact()) <= {"default"}
    plain.drain()
    try:
        assert plain.stats()["draining"]
    finally:
        plain.resume()
    assert plain.match("n", [b"k" * 16]).tiers == ()


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:7700", "ftp://here", "http://", "http://h?x=1", "http://[::1", "http://h:port", "http://h:65536"],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://host:port"):
        Client(url)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("token", ["geheim\n", "geheim\r", "geheim ", "gehe\x00im", "geh\u00e9im", "geheim\udcff"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(kind: type, token: str) -> None:
    with pytest.raises(ConfigError, match=f"token or API key of {len(token)} characters") as caught:
        kind("http://127.0.0.1:9", token=token)
    assert "geh" not in str(caught.value)
