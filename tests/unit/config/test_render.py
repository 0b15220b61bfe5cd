import importlib.util
import json
import tomllib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import EngineSettings, format_size, load_config, to_toml
from kvtier.engine.options import EngineOptions

ROOT = Path(__file__).parents[3]

SIZES = st.integers(1, 1 << 50)
COUNTS = st.integers(1, 1 << 20)
PATHS = st.text(
    st.characters(min_codepoint=32, exclude_categories=["Cs"], exclude_characters="~\x7f/"), min_size=1
).map("/dir/{}".format)
HOST = st.fixed_dictionaries({}, optional={"capacity": SIZES})
NVME = st.fixed_dictionaries(
    {"path": PATHS},
    optional={"capacity": SIZES, "segment_size": SIZES, "min_free": st.just(0) | SIZES, "durable": st.booleans()},
)
TIERING = st.one_of(
    st.fixed_dictionaries({"host": HOST}, optional={"nvme": NVME, "accept_lossy": st.booleans()}),
    st.just({"host": None}),
)
VALUES = st.fixed_dictionaries(
    {"tiering": TIERING},
    optional={
        "engine": st.fixed_dictionaries(
            {}, optional={"memory": SIZES, "seed": st.integers(0, (1 << 64) - 1), "max_running": COUNTS}
        ),
        "model": st.fixed_dictionaries({}, optional={"path": PATHS, "dtype": st.sampled_from(["auto", "bfloat16"])}),
        "log": st.just({"format": "json"}),
    },
)


@given(VALUES, st.booleans())
def test_what_is_printed_loads_as_the_same_configuration(tmp_path_factory, values, explain):
    loaded = load_config(values, environ={}, search=False)
    path = tmp_path_factory.mktemp("render") / "kvtier.toml"
    path.write_text(to_toml(loaded, explain=explain))
    again = load_config(environ={}, file=path)
    assert again.config == loaded.config
    assert set(again.origins) == set(loaded.origins)
    assert set(again.origins.values()) == {str(path)}


def test_explain_names_the_source_of_every_line():
    environ = {"KVTIER_TIERING__NVME__PATH": "/n", "KVTIER_ENGINE__SEED": "3"}
    lines = to_toml(load_config({"log": {"level": "info"}}, environ=environ, search=False), explain=True).splitlines()
    sources = {line.partition(" = ")[0]: line.rpartition("  # ")[2] for line in lines if " = " in line}
    assert sources["path"] == "KVTIER_TIERING__NVME__PATH"
    assert sources["seed"] == "KVTIER_ENGINE__SEED"
    assert sources["level"] == "Python argument"
    assert sources["block_size"] == "default"
    assert [line for line in lines if line.startswith("[")] == [
        "[model]",
        "[engine]",
        "[tiering]",
        "[tiering.host]",
        "[tiering.nvme]",
        "[server]",
        "[service]",
        "[events]",
        "[router]",
        "[log]",
    ]
    assert tomllib.loads("\n".join(lines))["tiering"]["host"] == {
        "capacity": "1GiB",
        "policy": "lru",
        "format": "raw",
        "copies": "inclusive",
    }


def test_the_documentation_is_generated_from_this_schema(tmp_path):
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs/generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page == generate.render(), "docs/configuration.md is out of date: run `make docs`"

    example = tmp_path / "example.toml"
    example.write_text(page.partition("```toml\n")[2].partition("```")[0])
    config = load_config(environ={}, file=example).config
    assert (config.engine.memory, config.tiering.nvme.capacity) == (2 << 30, 100 << 30)
    assert json.loads(config.model_dump_json())["tiering"]["nvme"]["path"] == "/var/cache/kvtier"


def test_the_documented_defaults_of_the_engine_are_its_own():
    options = EngineOptions()
    assert EngineOptions.from_config(EngineSettings()) == options
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert f"and num_blocks none: {format_size(options.memory_bytes)} |" in page
