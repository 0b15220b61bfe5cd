"""The pages of an LMDB file: whatever is wrong with them is found before LMDB dies of it.

LMDB ends the process where it meets a wrong page, so each file is tried in a child, which names the file that it is at.
"""

import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.nvme.extents import Extent
from kvtier.nvme.index import Index
from kvtier.nvme.ledger import DATABASES, Record, State, record_in
from kvtier.nvme.pages import DamagedIndex, check_pages, entries_of, missing_bytes, whole_entries

_PAGE = 4096
_TRIED = """if True:
    import sys
    from pathlib import Path
    from kvtier.errors import KVTierError
    from kvtier.nvme.extents import Extent
    from kvtier.nvme.index import Index
    from kvtier.nvme.ledger import DATABASES, Record
    from kvtier.nvme.pages import DamagedIndex, check_pages, missing_bytes

    def use(directory):
        index = Index(directory, 1 << 16, durable=False)
        try:
            with index.write() as ledger:
                found = sum(1 for _ in ledger.records())
                for at in range(9000, 9200):
                    record = Record((Extent(at, 1),), 4096, 0, True, 0, 0, at, None, bytes(16))
                    ledger.insert((at * 7919 % 65536).to_bytes(16, "big"), record)
                for at in range(0, 600, 2):
                    key = at.to_bytes(16, "big")
                    if (record := ledger.get(key)) is not None:
                        ledger.drop(key, record)
            with index.read() as ledger:
                assert sum(1 for _ in ledger.records()) <= found + 200
            return found
        finally:
            index.close()

    for line in sys.stdin:
        directory = Path(line.strip())
        print("trying", directory, flush=True)
        data = directory / "data.mdb"
        try:
            check_pages(data, DATABASES)
            with data.open("r+b") as file:
                file.truncate(data.stat().st_size + missing_bytes(data))
            print(use(directory), flush=True)
        except DamagedIndex:
            print("damaged", flush=True)
"""


def _record(page: int) -> Record:
    return Record((Extent(page, 1),), 4096, 0, True, 3, 0, page, b"p" * 16, b"c" * 16)


def _keys(count: int) -> list[bytes]:
    return [at.to_bytes(16, "big") for at in range(count)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An index of about 70 pages: 3 levels, free pages here and there, 1,700 records."""
    path = tmp_path_factory.mktemp("sound")
    index = Index(path, 1 << 16, durable=False)
    with index.write() as ledger:
        ledger.state = State(4000, 4000, 2000, 0, 0)
        ledger.format("raw")
        for at, key in enumerate(_keys(2000)):
            ledger.insert(key, _record(at))
    for start in (1700, 1800, 1900):
        with index.write() as ledger:
            for at in range(start, start + 100):
                ledger.drop(at.to_bytes(16, "big"), _record(at))
            ledger.release([Extent(at, 1) for at in range(start, start + 100, 3)])
    index.close()
    return (path / "data.mdb").read_bytes()


def _tried(paths: list[Path]) -> list[str]:
    """What became of each file: `damaged`, or how many records LMDB found in it."""
    process = subprocess.run(
        [sys.executable, "-c", _TRIED], check=False, input="\n".join(map(str, paths)), text=True, capture_output=True
    )
    assert process.returncode == 0, (process.stdout.splitlines()[-1:], process.stderr[-2000:])
    return process.stdout.splitlines()[1::2]


def _written(tmp_path: Path, files: Iterator[bytes]) -> list[Path]:
    paths = []
    for number, data in enumerate(files):
        path = tmp_path / str(number)
        path.mkdir()
        (path / "data.mdb").write_bytes(data)
        paths.append(path)
    return paths


def test_a_sound_file(tmp_path: Path, sound: bytes) -> None:
    assert 60 <= len(sound) // _PAGE <= 90
    (path,) = _written(tmp_path, iter([sound]))
    assert check_pages(path / "data.mdb", DATABASES)
    assert check_pages(path / "absent.mdb", DATABASES)
    assert _tried([path]) == ["1700"]
    assert check_pages(path / "data.mdb", DATABASES)


def test_every_state_that_lmdb_leaves_is_sound(tmp_path: Path) -> None:
    dice = random.Random(5)
    index = Index(tmp_path, 1 << 16, durable=False)
    check_pages(tmp_path / "data.mdb", DATABASES)
    here: list[bytes] = []
    for step in range(60):
        with index.write() as ledger:
            ledger.format(f"format {step % 7}")
            for at in range(dice.randrange(200)):
                here.append(dice.randbytes(16))
                ledger.insert(here[-1], _record(at))
            for _ in range(dice.randrange(len(here)) if step % 5 == 4 else 0):
                ledger.drop(here.pop(dice.randrange(len(here))), _record(0))
            if step % 20 == 19:
                ledger.free.replace([Extent(page, 1) for page in range(0, 4000, 2)])
        assert check_pages(tmp_path / "data.mdb", DATABASES)
    copy = tmp_path / "copy"
    copy.mkdir()
    index.compact_into(copy)
    assert check_pages(copy / "data.mdb", DATABASES)
    index.close()


def test_truncated_at_every_page(tmp_path: Path, sound: bytes) -> None:
    ends = range(0, len(sound), _PAGE)
    found = _tried(_written(tmp_path, (sound[: end + end % 3] for end in ends)))
    # What is missing is in use, or was free: then nothing is lost.
    assert len(found) == len(ends)
    assert set(found) <= {"damaged", "1700"}
    assert found[:40] == ["damaged"] * 40


def _zeroed(data: bytearray, dice: random.Random) -> None:
    page = dice.randrange(len(data) // _PAGE) * _PAGE
    data[page : page + _PAGE] = bytes(_PAGE)


def _scribbled(data: bytearray, dice: random.Random) -> None:
    page = dice.randrange(len(data) // _PAGE) * _PAGE
    data[page : page + _PAGE] = dice.randbytes(_PAGE)


def _swapped(data: bytearray, dice: random.Random) -> None:
    one, two = (page * _PAGE for page in dice.sample(range(len(data) // _PAGE), 2))
    data[one : one + _PAGE], data[two : two + _PAGE] = data[two : two + _PAGE], data[one : one + _PAGE]


def _flipped_in_headers(data: bytearray, dice: random.Random) -> None:
    page = dice.randrange(len(data) // _PAGE) * _PAGE
    for _ in range(3):
        data[page + dice.randrange(152)] ^= 1 << dice.randrange(8)


def _flipped(data: bytearray, dice: random.Random) -> None:
    for _ in range(8):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


@pytest.mark.parametrize("damage", [_zeroed, _scribbled, _swapped, _flipped_in_headers, _flipped])
def test_whatever_happens_to_pages_kills_nobody(
    tmp_path: Path, sound: bytes, damage: Callable[[bytearray, random.Random], None]
) -> None:
    def damaged() -> Iterator[bytes]:
        for seed in range(40):
            data = bytearray(sound)
            damage(data, random.Random(seed))
            yield bytes(data)

    found = _tried(_written(tmp_path, damaged()))
    assert len(found) == 40
    assert found.count("damaged") >= 8
    # A page that was free is no loss; a header's or a record's bits are found, or change no more than records.
    assert all(count == "damaged" or 1690 <= int(count) <= 1700 for count in found)


@pytest.mark.parametrize("damage", [_zeroed, _scribbled, _swapped, _flipped_in_headers, _flipped])
def test_what_is_whole_is_found_and_nothing_that_was_deleted(
    tmp_path: Path, sound: bytes, damage: Callable[[bytearray, random.Random], None]
) -> None:
    here, data_file = set(_keys(1700)), tmp_path / "data.mdb"
    data_file.write_bytes(sound)
    assert {key for key, value in whole_entries(data_file) if record_in(key, value)} == here
    assert entries_of(data_file, "blk") == 1700
    hopeless = 0
    for seed in range(60):
        data = bytearray(sound)
        damage(data, random.Random(seed))
        data_file.write_bytes(data)
        try:
            found = {key for key, value in whole_entries(data_file) if record_in(key, value)}
        except DamagedIndex:
            hopeless += 1
            continue
        assert found <= here
        # At most 8 bytes are changed, each on a page of at most 48 records.
        assert len(found) >= 1700 - (8 * 48 if damage is _flipped else 2 * 48)
        assert entries_of(data_file, "blk") in (None, 1700)
    # Where neither the pages that say what is in use can be read, nor the trees.
    assert hopeless < 15


def _newest(sound: bytes) -> int:
    return max((0, _PAGE), key=lambda at: struct.unpack_from("<Q", sound, at + 144)[0])


def _free_lists(sound: bytes) -> list[int]:
    """Where the nodes lie that list free pages."""
    root = struct.unpack_from("<Q", sound, _newest(sound) + 80)[0] * _PAGE
    lower = struct.unpack_from("<H", sound, root + 12)[0]
    return [root + struct.unpack_from("<H", sound, root + at)[0] for at in range(16, lower, 2)]


def test_an_altered_list_of_free_pages_costs_one_page_at_most(tmp_path: Path, sound: bytes) -> None:
    """And nothing that was deleted comes back from a page that seems to be in use."""
    data_file, costs = tmp_path / "data.mdb", list[int]()
    for node in _free_lists(sound):
        size = struct.unpack_from("<H", sound, node)[0]
        for at in range(0, size, 8):
            for bit in (0, 1, 3, 5, 13):
                data = bytearray(sound)
                data[node + 16 + at + bit // 8] ^= 1 << bit % 8
                data_file.write_bytes(data)
                found = {key for key, value in whole_entries(data_file) if record_in(key, value)}
                assert found <= set(_keys(1700))
                costs.append(1700 - len(found))
    assert len(costs) > 50
    assert max(costs) <= 48
    assert costs.count(0) > len(costs) * 3 // 4


@pytest.mark.parametrize("newer", [True, False])
def test_a_damaged_meta_page_costs_nothing_as_long_as_it_says_which_one_is_newer(
    tmp_path: Path, sound: bytes, newer: bool
) -> None:
    data_file = tmp_path / "data.mdb"
    start = _newest(sound) if newer else _PAGE - _newest(sound)
    hopeless = set()
    for bit in range(0, 8 * 152, 3):
        data = bytearray(sound)
        data[start + bit // 8] ^= 1 << bit % 8
        data_file.write_bytes(data)
        try:
            assert {key for key, value in whole_entries(data_file) if record_in(key, value)} == set(_keys(1700))
        except DamagedIndex:
            hopeless.add(bit // 64)
            assert entries_of(data_file, "blk") in (1700, None)
    # Sizes of page, map and file; the number of the transaction.
    assert hopeless <= ({4, 5, 17, 18} if newer else {18})
    data = bytearray(sound)
    data[start : start + _PAGE] = bytes(_PAGE)
    data_file.write_bytes(data)
    with pytest.raises(DamagedIndex, match="no sound meta page"):
        list(whole_entries(data_file))


def test_a_page_that_is_free_and_in_use(tmp_path: Path, sound: bytes) -> None:
    (path,) = _written(tmp_path, iter([sound]))
    data_file = path / "data.mdb"
    main_root = struct.unpack_from("<Q", sound, _newest(sound) + 128)[0]
    node = _free_lists(sound)[0]
    data = bytearray(sound)
    struct.pack_into("<QQ", data, node + 16, 1, main_root)
    data_file.write_bytes(data)
    with pytest.raises(DamagedIndex):
        check_pages(data_file, DATABASES)


@pytest.mark.parametrize(("at", "other"), [(1001, 700), (650, 5000), (1300, 2)])
def test_keys_out_of_order_harm_nobody_and_are_told(tmp_path: Path, sound: bytes, at: int, other: int) -> None:
    key, altered = (number.to_bytes(16, "big") for number in (at, other))
    (path,) = _written(tmp_path, iter([sound.replace(key, altered)]))
    assert not check_pages(path / "data.mdb", DATABASES)
    (found,) = _tried([path])
    assert int(found) == 1699


def test_other_databases_than_the_index_has(tmp_path: Path, sound: bytes) -> None:
    (path,) = _written(tmp_path, iter([sound]))
    with pytest.raises(DamagedIndex):
        check_pages(path / "data.mdb", DATABASES[1:])


def test_a_shortened_file_is_noticed(tmp_path: Path, sound: bytes) -> None:
    (path,) = _written(tmp_path, iter([sound]))
    data = path / "data.mdb"
    assert missing_bytes(data) == 0
    os.truncate(data, len(sound) - 3 * _PAGE)
    assert missing_bytes(data) == 3 * _PAGE
    assert missing_bytes(path / "none.mdb") == 0
    data.write_bytes(b"no index at all" * 1000)
    with pytest.raises(DamagedIndex, match="no sound meta page"):
        missing_bytes(data)
