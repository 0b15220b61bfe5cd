"""Names of the secondary tier: other hashes, groups, weights or shapes of blocks never share a key."""

import json
from pathlib import Path

import pytest
from kvtier_vllm.secondary_names import BlockNames, namespace_of, weights_of

from kvtier.errors import ConfigError
from kvtier.keys import namespace_digest

HASHES = [bytes([at]) * 32 + group.to_bytes(4, "big") for at in range(20) for group in (0, 1)]
FACTS = {"bytes": 4096, "dtype": "float32", "groups": [[0, 32, ["layer.0"]]]}


def test_names_are_the_same_everywhere_and_differ_by_all_that_matters() -> None:
    spaces = [
        namespace_of("model", FACTS),
        namespace_of("other", FACTS),
        namespace_of("model", FACTS, salt="tenant"),
        namespace_of("model", {**FACTS, "bytes": 8192}),
    ]
    keys = [key for space in spaces for key in BlockNames(space).keys(HASHES)]
    assert len(set(keys)) == len(spaces) * len(HASHES)
    assert {len(key) for key in keys} == {16}
    # What is on disks must be found again by later versions.
    assert keys[0].hex() == "4167bdee1a3e8205b06cc7ea53cc42b3"


def test_refs_are_exact_leaves_of_their_namespace() -> None:
    space = namespace_of("model", FACTS)
    names = BlockNames(space)
    refs = names.refs(HASHES)
    assert [ref.key for ref in refs] == names.keys(HASHES)
    assert {(ref.depth, ref.parent, ref.exact) for ref in refs} == {(-1, None, True)}
    assert {namespace_digest(ref.ns) for ref in refs} == {space.digest}


def test_weights_are_told_apart_by_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"layers": 2}))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(1000))
    first = weights_of(str(tmp_path))
    assert weights_of(str(tmp_path)) == first
    weights.write_bytes(bytes(999) + b"\x01")
    assert weights_of(str(tmp_path)) != first


def test_a_model_that_is_no_directory_has_to_be_named() -> None:
    with pytest.raises(ConfigError, match=r'"model": "<name>@<revision>"'):
        weights_of("someone/some-model")
