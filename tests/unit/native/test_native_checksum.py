"""Copy and checksum in one pass: equal to xxhash's own, at every length and alignment."""

import random
import threading

import pytest
import xxhash

from kvtier.native import checksum
from kvtier.native.checksum import HEAD_BYTES, copy_checksums

_EDGES = [1, 64, 176, 177, 178, 240, 241, 895, 896, 897, 959, 960, 961, 1023, 1024, 1025, 1984, 1985, 65_536, 131_073]


@pytest.fixture(params=["compiled", "portable"])
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "portable":
        monkeypatch.setattr(checksum, "_compiled", None)
    elif not checksum.available():
        pytest.skip("the extension was not built")


def _checksum(head: bytes, source: memoryview, target: memoryview | None = None) -> bytes:
    return copy_checksums([head], [source], [target], [source.nbytes])[0]


@pytest.mark.usefixtures("_path")
def test_copies_and_hashes_like_xxhash() -> None:
    dice = random.Random(1)
    for size in [*_EDGES, *(dice.randrange(1, 300_000) for _ in range(60))]:
        head, before, after = dice.randbytes(HEAD_BYTES), dice.randrange(65), dice.randrange(65)
        source = memoryview(dice.randbytes(before + size))[before:]
        room = bytearray(b"\xee" * (after + size + 32))
        expected = xxhash.xxh3_128(head + bytes(source)).digest()
        assert _checksum(head, source) == expected, size
        assert _checksum(head, source, memoryview(room)[after:]) == expected, size
        assert bytes(room) == b"\xee" * after + bytes(source) + b"\xee" * 32, size


@pytest.mark.usefixtures("_path")
def test_a_batch_takes_the_leading_bytes_of_each() -> None:
    dice = random.Random(2)
    sizes = [dice.randrange(1, 9000) for _ in range(20)] + [4096] * 4
    heads = [dice.randbytes(HEAD_BYTES) for _ in sizes]
    sources = [dice.randbytes(size + dice.randrange(100)) for size in sizes]
    targets = [bytearray(size + 5) if at % 3 else None for at, size in enumerate(sizes)]
    views = [None if target is None else memoryview(target) for target in targets]
    found = copy_checksums(heads, list(map(memoryview, sources)), views, sizes)
    assert found == [xxhash.xxh3_128(h + s[:n]).digest() for h, s, n in zip(heads, sources, sizes, strict=True)]
    for source, target, size in zip(sources, targets, sizes, strict=True):
        assert target is None or bytes(target) == source[:size] + bytes(5)
    assert copy_checksums([], [], [], []) == []


@pytest.mark.usefixtures("_path")
def test_threads_do_not_disturb_each_other() -> None:
    blocks = [random.Random(seed).randbytes(200_000) for seed in range(4)]
    wrong: list[bytes] = []

    def work(number: int) -> None:
        expected = xxhash.xxh3_128(bytes(HEAD_BYTES) + blocks[number]).digest()
        target = bytearray(len(blocks[number]))
        found = {_checksum(bytes(HEAD_BYTES), memoryview(blocks[number]), memoryview(target)) for _ in range(50)}
        wrong.extend(found - {expected})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(not checksum.available(), reason="the extension was not built")
def test_extension_refuses_what_it_would_overrun() -> None:
    compiled = checksum._compiled
    assert compiled is not None
    good = (bytes(64), memoryview(bytes(1000)), memoryview(bytearray(1000)), 1000)
    for head, source, room, size in (
        (63, 1000, 1000, 1000),
        (64, 999, 1000, 1000),
        (64, 1000, 999, 1000),
        (64, 9, 9, 9),
    ):
        bad = (bytes(head), memoryview(bytes(source)), memoryview(bytearray(room)), size)
        with pytest.raises(ValueError, match="expected bytes of 64"):
            compiled.copy_checksums(*(list(column) for column in zip(good, bad, strict=True)))
    with pytest.raises(ValueError, match="as many of each"):
        compiled.copy_checksums([bytes(64)], [], [], [])
    with pytest.raises(BufferError):
        compiled.copy_checksums([bytes(64)], [memoryview(bytes(1000))], [memoryview(bytes(1000))], [1000])
