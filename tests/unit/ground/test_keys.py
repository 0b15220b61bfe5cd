"""Keys: stable across everything, split-invariant, never shared between namespaces."""

import hashlib
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import RequestError
from kvtier.keys import Chain, Namespace, encode_extra, forget_namespace, namespace_digest, namespace_index, store_keys


def chained(tokens: list[int], block_size: int, extras: dict[int, bytes] | None = None) -> list[bytes]:
    """Written from the definition, with struct and hashlib only."""
    keys: list[bytes] = []
    for at in range(len(tokens) // block_size):
        block = tokens[at * block_size : (at + 1) * block_size]
        data = struct.pack(f"<{block_size}I", *block)
        keys.append(hashlib.sha256((keys[-1] if keys else b"") + data + (extras or {}).get(at, b"")).digest())
    return keys


def keys_of(tokens: list[int], block_size: int, extras: dict[int, bytes] | None = None) -> list[bytes]:
    chain = Chain(block_size, extras)
    chain.extend(tokens)
    return chain.keys


def test_fixed_vectors() -> None:
    # sha256 of 00000000 01000000 02000000 03000000, then of that digest and 04.. 05.. 06.. 07..
    assert [key.hex() for key in keys_of(list(range(9)), 4)] == [
        hashlib.sha256(bytes.fromhex("00000000010000000200000003000000")).hexdigest(),
        "01414b052706d93bd0f1f1646c0e8ca2fa8ef5efd7bcc99f7a1cee8eb11ad052",
    ]


@settings(max_examples=100)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.sampled_from([1, 3, 16]), st.data())
def test_definition_and_split_invariance(tokens: list[int], block_size: int, data: st.DataObject) -> None:
    expected = chained(tokens, block_size)
    assert keys_of(tokens, block_size) == expected
    chain, left = Chain(block_size), tokens
    while left:
        cut = data.draw(st.integers(0, len(left)))
        chain.extend(left[: cut or 1] if cut % 2 else np.array(left[: cut or 1], dtype=np.uint32))
        left = left[cut or 1 :]
    assert chain.keys == expected


@pytest.mark.parametrize("dtype", ["<u4", ">u4", "i8", "u8", "u2"])
@pytest.mark.parametrize("step", [1, 3])
def test_every_integer_array_names_the_same_blocks(dtype: str, step: int) -> None:
    tokens = np.arange(40_000, 40_000 + 90)
    chain = Chain(4)
    chain.extend(np.repeat(tokens, step).astype(dtype)[::step])
    assert chain.keys == chained(tokens.tolist(), 4)


def test_extras_change_their_block_and_all_behind_it() -> None:
    tokens = list(range(16))
    plain = keys_of(tokens, 4)
    extras = {1: encode_extra([("mm", b"image")])}
    marked = keys_of(tokens, 4, extras)
    assert marked == chained(tokens, 4, extras)
    assert marked[0] == plain[0]
    assert not set(marked[1:]) & set(plain)


def test_extra_encoding_is_unambiguous() -> None:
    assert encode_extra([]) == b""
    assert encode_extra([("mm", b"ab")]) == b"\x02\0\0\0mm\x02\0\0\0ab"
    assert encode_extra([("a", b"b"), ("c", b"d")]) != encode_extra([("a", b"bc"), ("", b"d")])


def test_five_thousand_images_do_not_collide() -> None:
    keys = {keys_of([7] * 16, 16, {0: encode_extra([("mm", str(i).encode())])})[0][:16] for i in range(5000)}
    assert len(keys) == 5000


@pytest.mark.parametrize("tokens", [[-1], [2**32], [5, -3, 2]])
def test_impossible_tokens_are_refused(tokens: list[int]) -> None:
    with pytest.raises(RequestError, match=r"expected 0\.\."):
        keys_of(tokens, 1)


SPACE = Namespace("llama", b"layout" * 4, numerics="bf16", lora="l", salt="s")


def variants() -> list[Namespace]:
    base = {"model": "m", "layout": b"l", "numerics": "n", "lora": "o", "salt": "s", "scheme": "c"}
    changed = [
        base | {name: (value + b"x" if isinstance(value, bytes) else value + "x")} for name, value in base.items()
    ]
    moved = base | {"lora": "os", "salt": ""}
    return [Namespace(**fields) for fields in (base, *changed, moved)]


def test_namespaces_differ_by_every_field() -> None:
    spaces = variants()
    assert len({space.digest for space in spaces}) == len(spaces)
    masks = {space.mask(group, shard) for space in spaces for group in range(3) for shard in range(3)}
    assert len(masks) == len(spaces) * 9


def test_salts_never_share_keys() -> None:
    chain = keys_of(list(range(64)), 16)
    seen: set[bytes] = set()
    for salt in range(500):
        keys = set(store_keys(chain, Namespace("m", b"l", salt=str(salt)).mask()))
        assert not keys & seen
        seen |= keys


def test_store_keys_are_chain_heads_under_the_mask() -> None:
    chain = keys_of(list(range(80)), 16)
    mask = SPACE.mask(1, 2)
    assert store_keys(chain, mask) == [bytes(a ^ b for a, b in zip(key, mask, strict=False)) for key in chain]
    assert store_keys([key[:16] for key in chain], mask) == store_keys(chain, mask)
    assert store_keys([], mask) == []


# Made once from the definitions with hashlib, struct and json alone: a change here orphans every stored block.
NAMES = [
    "8e9a40cd4d00ca689373b546122990a30e5712b4d652c91382099d8e7561a1e0",
    "9def64be31d7437da89d730c0f0c99af",
    "24f01d2373fb66424ebb49d9c97ae2ba",
    "28238f3fb59e4a6ac7b0884a1104ddfc",
]

SCRIPT = """
from kvtier.keys import Chain, Namespace, encode_extra, store_keys
from kvtier.layout import GroupKind, LayerGroup, Layout
layout = Layout(16, (LayerGroup(GroupKind.GQA, (0, 1), 2, 3, 64, dtype="bfloat16"),))
space = Namespace("llama", layout.fingerprint, salt="s")
chain = Chain(16, {1: encode_extra([("mm", b"x")])})
chain.extend(range(48))
print(layout.fingerprint.hex(), *(key.hex() for key in store_keys(chain.keys, space.mask(0, 1))))
"""


def test_names_are_the_same_in_every_process() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs == {" ".join(NAMES) + "\n"}


def test_namespace_registry() -> None:
    first, second = namespace_index(b"a" * 32), namespace_index(b"b" * 32)
    assert first != second
    assert namespace_index(b"a" * 32) == first
    assert namespace_digest(second) == b"b" * 32


def test_an_index_that_was_forgotten_is_nobodys() -> None:
    first, second = namespace_index(b"c" * 32), namespace_index(b"d" * 32)
    forget_namespace(first)
    forget_namespace(first)
    with pytest.raises(IndexError):
        namespace_digest(first)
    again = namespace_index(b"c" * 32)
    assert again not in (first, second)
    assert (namespace_digest(again), namespace_digest(second)) == (b"c" * 32, b"d" * 32)
