import math

import pytest

from kvtier.engine import EngineOptions, SamplingParams
from kvtier.errors import ConfigError, RequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", None),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", "text"),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop_token_ids", (-1,)),
        ("accept_lossy", "yes"),
        ("cache_salt", ""),
        ("cache_salt", b"bytes"),
        ("cache_salt", "\ud800"),
    ],
)
def test_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert "expected" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_limits_are_accepted_and_lists_become_immutable() -> None:
    params = SamplingParams(
        max_tokens=None, temperature=0, top_k=0, top_p=1, seed=2**64 - 1, stop=["a", "b"], stop_token_ids=[0, 0, 5]
    )
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == {0, 5}
    assert hash(params) == hash(SamplingParams(**{name: getattr(params, name) for name in params.__slots__}))


@pytest.mark.parametrize(("temperature", "top_k", "greedy"), [(0.0, 0, True), (1.0, 1, True), (1.0, 2, False)])
def test_greedy(temperature: float, top_k: int, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature, top_k=top_k).greedy is greedy


@pytest.mark.parametrize("field", ["block_size", "num_blocks", "memory_bytes", "max_running", "token_budget"])
def test_options_below_one_are_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}=0"):
        EngineOptions(**{field: 0})


def test_two_pool_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        EngineOptions(num_blocks=4, memory_bytes=1 << 20)
