"""What vLLM's KV is compatible with: layouts of opaque pages, numerics, weights."""

from types import SimpleNamespace

import pytest
from kvtier_vllm.identity import Pool, layout_of, namespace_of

from kvtier import formats
from kvtier.errors import ConfigError, FormatMismatch
from kvtier.layout import DTYPE_BYTES

PAGE = 32 * 2 * 3 * 64 * 2
POOL = Pool((PAGE,) * 30, "bfloat16", "CPU_ATTN+x86_64")


def _layout(pool=POOL, ranks=((0, 0),), block_size=32, engine="vllm-cpu/0.32"):
    return layout_of(dict.fromkeys(ranks, pool), block_size, engine)


@pytest.mark.parametrize(
    "pool",
    [
        POOL,
        Pool((PAGE * 30,), "bfloat16", "x"),
        Pool((PAGE, PAGE // 2), "float16", "x"),
        Pool((32 * 656,) * 2, "int8", "x"),
        Pool((32 * 33,), "bfloat16", "x"),
    ],
)
def test_a_blocks_bytes_are_its_pages(pool):
    layout = _layout(pool)
    assert layout.block_bytes() == sum(pool.pages)
    assert layout.groups[0].dtype in DTYPE_BYTES


def test_what_bytes_depend_on_is_in_the_fingerprint():
    names = [
        _layout(),
        _layout(block_size=16),
        _layout(ranks=((0, 0), (0, 1))),
        _layout(ranks=((0, 0), (1, 0))),
        _layout(engine="vllm-cpu/0.33"),
        _layout(Pool(POOL.pages, "float16", POOL.kernel)),
        _layout(Pool(POOL.pages, "bfloat16", "CPU_ATTN+x86_64-amx")),
        _layout(Pool((PAGE,) * 29, "bfloat16", POOL.kernel)),
    ]
    assert len({layout.fingerprint for layout in names}) == len(names)
    assert [layout.shards for layout in names[:4]] == [1, 1, 2, 2]
    assert _layout().fingerprint == names[0].fingerprint


def test_pages_take_lossless_formats_only():
    layout = _layout()
    for name in formats.names():
        if name in ("raw", "bitsplit"):
            assert formats.get(name).bound(layout) >= layout.block_bytes()
            continue
        with pytest.raises(FormatMismatch):
            formats.get(name).size(layout)


def test_workers_with_unequal_parts_are_refused():
    with pytest.raises(ConfigError, match="expected equal parts"):
        layout_of({(0, 0): POOL, (1, 0): Pool((PAGE,) * 29, "bfloat16", POOL.kernel)}, 32, "vllm")
    with pytest.raises(ConfigError, match="expected a multiple"):
        _layout(Pool((33,), "int8", "x"))


def _config(path, **changed):
    hf_config = {"hidden_size": 8, "transformers_version": "5", "_name_or_path": str(path), "rope_type": "default"}
    hf_config |= changed.pop("hf_config", {})
    model = {"dtype": "float32", "quantization": None, "model_weights": "", "model": str(path), "revision": None}
    model |= {"max_model_len": 512}
    load_format = changed.pop("load_format", "auto")
    cache_dtype = changed.pop("cache_dtype", "auto")
    draft = changed.pop("draft", None)
    config = SimpleNamespace(to_dict=lambda: hf_config)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config, **model | changed),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        load_config=SimpleNamespace(load_format=load_format),
        speculative_config=draft,
    )


def _digest(config, *, model=None, salt="", version="0.32"):
    return namespace_of(config, _layout(), version, model=model, salt=salt).digest


def test_what_values_depend_on_is_in_the_namespace(tmp_path):
    for name, data in (("a", b"weights"), ("b", b"weights"), ("c", b"Weights")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(data)
    a, b, c = (tmp_path / name for name in "abc")
    own = _digest(_config(a))
    assert _digest(_config(b)) == own
    assert _digest(_config(a, hf_config={"transformers_version": "6"})) == own
    assert _digest(_config(a, max_model_len=1024)) == own
    others = [
        _digest(_config(c)),
        _digest(_config(a, dtype="bfloat16")),
        _digest(_config(a, cache_dtype="fp8")),
        _digest(_config(a, quantization="awq")),
        _digest(_config(a, hf_config={"rope_theta": 5.0})),
        _digest(_config(a), salt="s"),
        _digest(_config(a, draft=SimpleNamespace(method="eagle", model="small"))),
        _digest(_config(a), version="0.33"),
        _digest(_config(a), model="name"),
        _digest(_config(a, load_format="dummy")),
        _digest(_config(a, hf_config={"rope_type": "longrope"})),
        _digest(_config(a, hf_config={"rope_type": "longrope"}, max_model_len=1024)),
    ]
    assert len({own, *others}) == 1 + len(others)


def test_weights_that_cannot_be_read_need_a_name(tmp_path):
    with pytest.raises(ConfigError, match="kv_connector_extra_config"):
        _digest(_config(tmp_path))
    assert _digest(_config(tmp_path), model="mine") == _digest(_config(tmp_path / "elsewhere"), model="mine")
