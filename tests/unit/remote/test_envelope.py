"""The envelope says what was packed, and nothing else is taken for one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.keys import Namespace, namespace_index
from kvtier.remote import ENVELOPE_BYTES, NAME_BYTES, record_name
from kvtier.remote.envelope import pack, unpack
from kvtier.tiers import BlockRef

NS = namespace_index(Namespace("m", b"layout").digest)
KEYS = st.binary(min_size=16, max_size=16)
REFS = st.builds(
    BlockRef,
    key=KEYS,
    ns=st.just(NS),
    depth=st.integers(-1, 2**31 - 1),
    parent=st.none() | KEYS,
    exact=st.booleans(),
)
FORMATS = st.text("abcdefgh0123456789", min_size=1, max_size=16)


def sample(exact: bool = True) -> tuple[bytes, bytes]:
    ref = BlockRef(b"k" * 16, NS, 3, b"p" * 16, exact)
    return record_name(ref.key, exact=exact), pack(ref, "raw", 4096, b"c" * 16)


@settings(max_examples=50)
@given(REFS, FORMATS, st.integers(1, 2**32 - 1), st.binary(min_size=16, max_size=16))
def test_what_is_packed_is_unpacked(ref: BlockRef, fmt: str, nbytes: int, checksum: bytes) -> None:
    head = pack(ref, fmt, nbytes, checksum)
    name = record_name(ref.key, exact=ref.exact)
    assert (len(head), len(name)) == (ENVELOPE_BYTES, NAME_BYTES)
    assert unpack(name, head) == (ref, fmt, nbytes, checksum)
    assert unpack(name, memoryview(bytearray(head))) == (ref, fmt, nbytes, checksum)


@pytest.mark.parametrize("at", range(ENVELOPE_BYTES))
def test_any_flipped_bit_is_noticed(at: int) -> None:
    name, head = sample()
    damaged = bytearray(head)
    damaged[at] ^= 1 << at % 8
    assert unpack(name, bytes(damaged)) is None


@pytest.mark.parametrize("nbytes", [0, 1, ENVELOPE_BYTES - 1, ENVELOPE_BYTES + 1])
def test_another_length_is_none(nbytes: int) -> None:
    name, head = sample()
    assert unpack(name, (head + b"\0")[:nbytes]) is None


def test_an_intact_record_under_another_name_is_none() -> None:
    _, head = sample()
    assert unpack(record_name(b"K" * 16, exact=True), head) is None


def test_a_lossy_record_under_an_exact_name_is_none() -> None:
    # Its seal is right: only the name says that whoever looks here wants exact blocks.
    _, lossy = sample(exact=False)
    assert unpack(record_name(b"k" * 16, exact=True), lossy) is None
    assert unpack(record_name(b"k" * 16, exact=False), lossy) is not None


def test_another_namespace_is_another_index() -> None:
    other = namespace_index(Namespace("other", b"layout").digest)
    ref = BlockRef(b"k" * 16, other, 0, None, exact=True)
    found = unpack(record_name(ref.key, exact=True), pack(ref, "raw", 1, bytes(16)))
    assert found is not None
    assert (found.ref.ns, found.ref.parent) == (other, None)
