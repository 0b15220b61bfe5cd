"""Two of kvtier's tiers below vLLM's own host tier: what one has lost, the other one gives."""

from secondary_world import BYTES, PROMPTS, Tiered, nvme


def test_what_one_tier_does_not_bring_comes_from_the_next(tiny, reference, tmp_path):
    expected = reference(PROMPTS, 8)
    with Tiered(tiny, nvme(tmp_path / "first"), nvme(tmp_path / "second")) as vllm:
        assert vllm.tokens(PROMPTS) == expected
        vllm.forget_hosts()
    (path,) = (tmp_path / "first").glob("*.kv")
    damaged = bytearray(path.read_bytes())
    damaged[::4096] = bytes(byte ^ 1 for byte in damaged[::4096])
    path.write_bytes(damaged)
    with Tiered(tiny, nvme(tmp_path / "first"), nvme(tmp_path / "second")) as vllm:
        assert vllm.given(PROMPTS) == (expected, BYTES)
        first, second = vllm.tiers
        assert first.store.metrics.value("corrupt_blocks_total", tier="nvme") > 0
        assert second.store.metrics.value("read_bytes_total", tier="nvme") == BYTES
