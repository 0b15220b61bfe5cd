"""The examples of plug-ins pass the public suites, work where the configuration names them, and are what docs show."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from kvtier import formats
from kvtier.config import load_config
from kvtier.formats import Format
from kvtier.layout import GroupKind, LayerGroup, Layout
from kvtier.metrics import Metrics
from kvtier.policies import EvictionPolicy, make_policy
from kvtier.store import open_store
from kvtier.testing import FormatSuite, PolicySuite, TierSuite
from kvtier.testing.blocks import chain_refs, content
from kvtier.tiers import Tier

ROOT = Path(__file__).parents[2]
POLICY, FORMAT = "own_policy:LfuPolicy", "own_format:DeflateFormat"


@pytest.fixture(autouse=True)
def _examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


class TestLfuPolicy(PolicySuite):
    def make_policy(self, clock: Callable[[], float]) -> EvictionPolicy:
        return make_policy(POLICY, 100, clock)


def test_the_least_often_used_leaves_first() -> None:
    policy = importlib.import_module("own_policy").LfuPolicy(100)
    policy.insert([0, 1, 2], [b"0" * 16, b"1" * 16, b"2" * 16], [None] * 3)
    policy.hit([0])
    policy.hit([0])
    policy.hit([1])
    policy.hit([2])
    policy.hit([1])
    policy.hit([1])
    assert policy.victims(3) == [2, 0, 1]


class TestDeflateFormat(FormatSuite):
    dtypes = ("float32", "bfloat16", "float16", "int8")

    def make_format(self) -> Format:
        return formats.get(FORMAT)


class TestHeapTier(TierSuite):
    @pytest.fixture(autouse=True)
    def _module(self, _examples_can_be_imported: None) -> None:
        self.module: ModuleType = importlib.import_module("own_tier")

    def make_tier(self, capacity_bytes: int, metrics: Metrics) -> Tier:
        return self.module.HeapTier(capacity_bytes, metrics=metrics)

    def corrupt(self, tier: Tier, key: bytes) -> None:
        tier._nodes[key].record.data[7] ^= 1  # type: ignore[attr-defined]


def test_the_configuration_can_name_them(tmp_path: Path) -> None:
    tiering = {
        "host": {"capacity": "1MiB", "policy": POLICY},
        "nvme": {"path": str(tmp_path), "capacity": "4MiB", "segment_size": "1MiB", "format": FORMAT},
    }
    store = open_store(load_config({"tiering": tiering}).config.tiering)
    assert store is not None
    refs = chain_refs(4)
    keys = [ref.key for ref in refs]
    layout = Layout(4, (LayerGroup(GroupKind.GQA, (0,), 2, 2, 64),))
    blocks = [content(ref, layout.block_bytes()) for ref in refs]
    store.register(refs[0].ns, layout)
    assert store.put(list(zip(refs, blocks, strict=True))).result(30).stored == 4
    store.flush()
    below = store.lower[0].acquire(keys, "reader").wait(30).handles
    assert [handle.fmt for handle in below] == ["deflate"] * 4
    store.lower[0].release(below)
    store.clear("host")
    lease = store.acquire(keys, "reader").result(30)
    assert store.fetch(lease, 0, 4).result(30) == 4
    above = store.host.acquire(keys, "reader").wait(30).handles
    assert [store.host.buffer(handle)[: handle.nbytes] for handle in above] == blocks
    store.host.release(above)
    store.release(lease)
    store.close()


@pytest.mark.parametrize("name", ["own_policy", "own_format"])
def test_the_page_shows_what_is_tested(name: str) -> None:
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    assert f"```python\n{source}```" in page
