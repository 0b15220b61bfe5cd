"""Copy and checksum in one pass: equal to xxhash's own, at every length and alignment."""

import random
import threading

import pytest
import xxhash

from kvtier.native import checksum
from kvtier.native.checksum import HEAD_BYTES, copy_checksum

_EDGES = [1, 64, 176, 177, 178, 240, 241, 895, 896, 897, 959, 960, 961, 1023, 1024, 1025, 1984, 1985, 65_536, 131_073]


@pytest.fixture(params=["compiled", "portable"])
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "portable":
        monkeypatch.setattr(checksum, "_compiled", None)
    elif not checksum.available():
        pytest.skip("the extension was not built")


@pytest.mark.usefixtures("_path")
def test_copies_and_hashes_like_xxhash() -> None:
    dice = random.Random(1)
    for size in [*_EDGES, *(dice.randrange(1, 300_000) for _ in range(60))]:
        head, before, after = dice.randbytes(HEAD_BYTES), dice.randrange(65), dice.randrange(65)
        source = memoryview(dice.randbytes(before + size))[before:]
        room = bytearray(b"\xee" * (after + size + 32))
        expected = xxhash.xxh3_128(head + bytes(source)).digest()
        assert copy_checksum(head, source) == expected, size
        assert copy_checksum(head, source, memoryview(room)[after:]) == expected, size
        assert bytes(room) == b"\xee" * after + bytes(source) + b"\xee" * 32, size


@pytest.mark.usefixtures("_path")
def test_threads_do_not_disturb_each_other() -> None:
    blocks = [random.Random(seed).randbytes(200_000) for seed in range(4)]
    wrong: list[bytes] = []

    def work(number: int) -> None:
        expected = xxhash.xxh3_128(bytes(HEAD_BYTES) + blocks[number]).digest()
        target = bytearray(len(blocks[number]))
        found = {copy_checksum(bytes(HEAD_BYTES), memoryview(blocks[number]), memoryview(target)) for _ in range(50)}
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
    for head, size, room in ((63, 1000, 1000), (64, 100, 100), (64, 1000, 999)):
        with pytest.raises(ValueError, match="expected 64"):
            compiled.copy_checksum(bytes(head), memoryview(bytes(size)), memoryview(bytearray(room)))
