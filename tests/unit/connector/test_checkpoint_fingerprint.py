"""What names a checkpoint: every byte of its weights, not when or where they were written."""

import os

import numpy as np
import pytest

from kvtier.connector import checkpoint
from kvtier.connector.checkpoint import fingerprint
from kvtier.errors import ModelError


def _write(path, seed=0):
    path.mkdir()
    values = np.random.default_rng(seed).integers(0, 256, 10_000, np.uint8)
    (path / "a.safetensors").write_bytes(values[:7000].tobytes())
    (path / "b.safetensors").write_bytes(values[7000:].tobytes())
    (path / "README.md").write_text(str(path))
    return path


def test_copies_are_equal_and_every_byte_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_PIECE", 1024)
    one, two = _write(tmp_path / "one"), _write(tmp_path / "two")
    name = fingerprint(one, ["config"])
    os.utime(two / "a.safetensors", (0, 0))
    assert fingerprint(two, ["config"]) == name
    seen = {name, fingerprint(one), fingerprint(one, ["other"]), fingerprint(_write(tmp_path / "three", 1), ["config"])}
    data = (two / "a.safetensors").read_bytes()
    for at in (0, 1023, 1024, 6999):
        (two / "a.safetensors").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        seen.add(fingerprint(two, ["config"]))
    # Cut elsewhere into files, they are other files: a miss, no more.
    (two / "a.safetensors").write_bytes(data[:-1])
    seen.add(fingerprint(two, ["config"]))
    assert len(seen) == 9


def test_a_single_file_is_a_checkpoint(tmp_path):
    one = _write(tmp_path / "one")
    assert fingerprint(one / "a.safetensors") != fingerprint(one / "b.safetensors")


def test_no_weights_are_an_error(tmp_path):
    for source in (tmp_path, tmp_path / "missing.gguf"):
        with pytest.raises(ModelError, match="no weight files"):
            fingerprint(source)
