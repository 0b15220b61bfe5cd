import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvtier.config import Config, load_config, settings
from kvtier.errors import ConfigError

LAYERS = ["file", "environ", "cli", "overrides"]  # lowest first
ORIGINS = {"environ": "KVTIER_ENGINE__MAX_RUNNING", "cli": "command line", "overrides": "Python argument"}


def nested(name, value):
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def load(tmp_path_factory=None, file_text=None, **sources):
    path = None
    if file_text is not None:
        path = tmp_path_factory.mktemp("config") / "kvtier.toml"
        path.write_text(file_text)
    sources.setdefault("environ", {})
    return load_config(file=path, search=False, **sources), path


def refusal(*arguments, **sources):
    with pytest.raises(ConfigError) as caught:
        load(*arguments, **sources)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- precedence


@given(st.dictionaries(st.sampled_from(LAYERS), st.integers(1, 1000)))
def test_the_highest_source_that_has_a_setting_decides_it(tmp_path_factory, values):
    text = f"[engine]\nmax_running = {values['file']}\n" if "file" in values else None
    environ = {"KVTIER_ENGINE__MAX_RUNNING": str(values["environ"])} if "environ" in values else {}
    mappings = {name: {"engine": {"max_running": values[name]}} for name in ("cli", "overrides") if name in values}
    loaded, path = load(tmp_path_factory, text, environ=environ, **mappings)
    winner = max(values, key=LAYERS.index, default=None)
    assert loaded.config.engine.max_running == values.get(winner, 16)
    assert loaded.origins["engine.max_running"] == {**ORIGINS, "file": str(path), None: "default"}[winner]
    assert loaded.origins["engine.block_size"] == "default"
    assert loaded.file == path


SWITCH = st.one_of(st.just("absent"), st.none(), st.just({}), st.builds(lambda n: {"capacity": n}, st.integers(1, 99)))


@given(st.tuples(SWITCH, SWITCH, SWITCH, SWITCH))
def test_a_tier_can_be_switched_off_and_on_again_at_every_level(tmp_path_factory, layers):
    file, variable, cli, overrides = layers
    text = {"absent": "", None: 'host = "none"'}.get(file) if file in ("absent", None) else "[tiering.host]"
    if isinstance(file, dict) and file:
        text += f"\ncapacity = {file['capacity']}"
    if file is None:
        text = f"[tiering]\n{text}"
    environ = {}
    if variable is None:
        environ["KVTIER_TIERING__HOST"] = "none"
    elif variable == {}:
        variable = "absent"  # a variable cannot say this
    elif variable != "absent":
        environ["KVTIER_TIERING__HOST__CAPACITY"] = str(variable["capacity"])
    mappings = {
        name: {"tiering": {"host": value}}
        for name, value in (("cli", cli), ("overrides", overrides))
        if value != "absent"
    }
    loaded, _ = load(tmp_path_factory, text, environ=environ, **mappings)

    expected = 1 << 30
    for layer in (file, variable, cli, overrides):
        if layer is None:
            expected = None
        elif layer != "absent":
            expected = layer.get("capacity", expected or 1 << 30)
    host = loaded.config.tiering.host
    assert (host and host.capacity) == expected
    assert ("tiering.host" in loaded.origins) == (expected is None)


# What a section cannot be on without, and a setting not be set without.
NEEDED = {
    "router.tls_cert": {"router.tls_key": "/key"},
    "router.tls_key": {"router.tls_cert": "/cert"},
    "service.tls_cert": {"service.tls_key": "/key"},
    "service.tls_key": {"service.tls_cert": "/cert"},
    "service.max_batch": {"service.inflight_bytes": "8GiB"},
    "service.max_block": {"service.max_batch": "4GiB", "service.inflight_bytes": "8GiB"},
    "tiering.nvme": {"tiering.nvme.path": "/nvme"},
    "tiering.remote": {"tiering.remote.url": "valkey://there"},
}


@pytest.mark.parametrize(
    "setting", [one for one in settings().values() if one.kind != "table"], ids=lambda one: one.name
)
def test_every_setting_has_a_variable_and_a_name_in_toml(tmp_path_factory, setting):
    text = {"size": "3GiB", "path": "/some/where", "true or false": "true", "whole number": "7", "number": "0.5"}.get(
        setting.kind, setting.kind.rpartition(" | ")[2]
    )
    needed = NEEDED.get(setting.name) or NEEDED.get(setting.name.rpartition(".")[0], {})
    context = {settings()[name].variable: value for name, value in needed.items()}
    loaded, _ = load(environ={**context, setting.variable: text})
    assert loaded.origins[setting.name] == setting.variable
    assert setting.name in loaded.origins
    assert setting.meaning

    section, _, field = setting.name.rpartition(".")
    value = text if setting.kind in ("whole number", "number", "true or false") else f'"{text}"'
    toml = f"[{section}]\n{field} = {value}\n"
    for name, other in needed.items():
        toml += "" if name == setting.name else f'{name.rpartition(".")[2]} = "{other}"\n'
    from_file, path = load(tmp_path_factory, toml)
    assert from_file.config == loaded.config
    assert from_file.origins[setting.name] == str(path)


def test_none_unsets_what_a_lower_source_has_set():
    loaded, _ = load(environ={"KVTIER_ENGINE__MEMORY": "1GiB"}, overrides={"engine": {"memory": None, "num_blocks": 9}})
    assert (loaded.config.engine.memory, loaded.config.engine.num_blocks) == (None, 9)
    loaded, _ = load(environ={"KVTIER_MODEL__PATH": "None"}, overrides={})
    assert loaded.config.model.path is None


def test_switching_a_tier_off_forgets_its_lower_settings():
    nvme = {"path": "/low", "capacity": "9GiB"}
    loaded, _ = load(cli={"tiering": {"nvme": nvme}}, overrides={"tiering": {"nvme": None}})
    assert loaded.config.tiering.nvme is None
    assert loaded.origins["tiering.nvme"] == "Python argument"
    assert not [name for name in loaded.origins if name.startswith("tiering.nvme.")]


def test_a_tilde_is_expanded_and_a_path_object_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    loaded, _ = load(overrides={"tiering": {"nvme": {"path": "~/kv"}}, "model": {"path": tmp_path / "model"}})
    assert loaded.config.tiering.nvme.path == tmp_path / "kv"
    assert loaded.config.model.path == str(tmp_path / "model")


def test_a_configuration_is_frozen():
    config = load()[0].config
    with pytest.raises(ValidationError):
        config.engine.block_size = 3
    assert config == Config()


# ---- where the file is


def test_the_file_is_searched_in_order(tmp_path, monkeypatch):
    def write(path, level):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'[log]\nlevel = "{level}"\n')
        return path

    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    environ = {"HOME": str(tmp_path / "home")}
    assert load_config(environ=environ).file is None
    write(tmp_path / "home/.config/kvtier/config.toml", "info")
    assert load_config(environ=environ).config.log.level == "info"
    environ["XDG_CONFIG_HOME"] = str(tmp_path / "xdg")
    assert load_config(environ=environ).file is None
    write(tmp_path / "xdg/kvtier/config.toml", "error")
    assert load_config(environ=environ).config.log.level == "error"
    write(here / "kvtier.toml", "debug")
    assert load_config(environ=environ).origins["log.level"] == "kvtier.toml"
    environ["KVTIER_CONFIG"] = str(write(tmp_path / "named.toml", "info"))
    assert load_config(environ=environ).config.log.level == "info"
    flag = write(tmp_path / "flag.toml", "error")
    assert load_config(environ=environ, file=flag).file == flag
    assert load_config(environ=environ, search=False).file is None


def test_a_named_file_must_be_there_and_be_toml(tmp_path):
    with pytest.raises(ConfigError, match=r"config file .*gone.toml: No such file"):
        load_config(environ={"KVTIER_CONFIG": str(tmp_path / "gone.toml")})
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(environ={}, file=tmp_path)
    bad = tmp_path / "bad.toml"
    for content in (b"[engine\n", b"\xff\xfe", b"a = 1\na = 2\n"):
        bad.write_bytes(content)
        with pytest.raises(ConfigError, match=r"bad.toml: not TOML: "):
            load_config(environ={}, file=bad)


# ---- refusals


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("engine.block_size", 0, "engine.block_size = 0 (Python argument): expected greater than or equal to 1"),
        ("engine.block_size", "x", "engine.block_size = 'x' (Python argument): expected a valid integer"),
        ("engine.block_size", True, "engine.block_size = True (Python argument): expected a whole number"),
        ("engine.block_size", 16.0, "engine.block_size = 16.0 (Python argument): expected a whole number"),
        ("engine.block_size", None, "engine.block_size = None (Python argument): expected a valid integer"),
        ("engine.seed", -1, "engine.seed = -1 (Python argument): expected greater than or equal to 0"),
        ("engine.memory", "-1GiB", "engine.memory = '-1GiB' (Python argument): expected a size such as"),
        ("engine.memory", 0, "engine.memory = 0 (Python argument): expected greater than or equal to 1"),
        ("engine.memory", "9" * 40, "expected less than or equal to 9223372036854775807"),
        ("model.device", "gpu", "model.device = 'gpu' (Python argument): expected 'auto', 'cpu' or 'cuda'"),
        ("model.path", "", "model.path = '' (Python argument): expected a path, not an empty text"),
        ("model.path", ["x"], "model.path = ['x'] (Python argument): expected a valid string"),
        ("tiering.accept_lossy", "maybe", "tiering.accept_lossy = 'maybe' (Python argument): expected a valid boolean"),
        ("tiering.host.capacity", {"a": 1}, "tiering.host.capacity = {'a': 1} (Python argument): expected a size"),
        ("tiering.host", "on", "tiering.host = 'on' (Python argument): expected a table, or \"none\" to switch it off"),
        ("engine", 3, "engine = 3 (Python argument): expected a table of settings"),
        ("engine", None, "engine = None (Python argument): expected a table of settings"),
        ("tiering.nvme", {}, "tiering.nvme.path: required, expected a path: Directory on a local disk"),
        (
            "engine.max_runing",
            3,
            "engine.max_runing (Python argument): unknown setting; did you mean engine.max_running?",
        ),
        (
            "capacity",
            3,
            "unknown setting; did you mean tiering.host.capacity or tiering.nvme.capacity or tiering.remote.capacity?",
        ),
        ("tiering.dram", {}, "tiering.dram (Python argument): unknown setting"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_source_and_what_was_expected(name, value, says):
    assert says in refusal(overrides=nested(name, value))


def test_there_is_one_way_to_write_a_nested_name():
    says = "expected nested tables, not a name with dots"
    assert says in refusal(overrides={"engine.block_size": 3})
    assert says in refusal(overrides={"tiering": {"host.capacity": 3}})


def test_a_long_value_does_not_flood_the_message():
    assert len(refusal(overrides={"engine": {"memory": "x" * 10_000}})) < 300


def test_an_error_names_the_file_it_came_from(tmp_path_factory):
    message = refusal(tmp_path_factory, "[tiering.nvme]\nsegment = 1\n")
    assert message.startswith("tiering.nvme.segment (")
    assert message.endswith("kvtier.toml): unknown setting; did you mean tiering.nvme.segment_size?")


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        (
            "KVTIER_ENGINE__MEMRY",
            "1",
            "engine.memry (KVTIER_ENGINE__MEMRY): unknown setting; did you mean engine.memory?",
        ),
        (
            "KVTIER_ENGINE_BLOCK_SIZE",
            "8",
            "KVTIER_ENGINE_BLOCK_SIZE: unknown variable; did you mean KVTIER_ENGINE__BLOCK",
        ),
        ("KVTIER_TIERING__NVME", "on", "tiering.nvme = 'on' (KVTIER_TIERING__NVME): expected a table, or \"none\""),
        ("KVTIER_LOG__LEVEL", "loud", "log.level = 'loud' (KVTIER_LOG__LEVEL): expected 'debug'"),
        (
            "KVTIER_ENGINE__BLOCK_SIZE",
            "",
            "engine.block_size = '' (KVTIER_ENGINE__BLOCK_SIZE): expected a valid integer",
        ),
    ],
)
def test_a_wrong_variable_is_named(variable, value, says):
    assert says in refusal(environ={variable: value})


def test_variables_of_others_are_left_alone():
    # What Kubernetes sets in every pod beside a service named kvtier, and kvtier's variables that are no settings.
    others = {"KVTIER_PORT": "tcp://10.0.0.1:80", "KVTIER_SERVICE_HOST": "10.0.0.1", "KVTIER_PORT_80_TCP_ADDR": "x"}
    others |= {"KVTIER_CACHE_DIR": "/c", "KVTIER": "1", "PATH": "/bin", "kvtier_engine__memory": "1"}
    assert load(environ=others)[0].config == Config()


def test_illegal_combinations_are_refused_with_both_sources():
    message = refusal(environ={"KVTIER_ENGINE__MEMORY": "1GB"}, cli={"engine": {"num_blocks": 4}})
    assert message == (
        "engine: memory and num_blocks both size the pool; keep one "
        "(engine.memory: KVTIER_ENGINE__MEMORY, engine.num_blocks: command line)"
    )
    message = refusal(environ={"KVTIER_TIERING__HOST": "none"}, cli={"tiering": {"nvme": {"path": "/n"}}})
    assert message.startswith("tiering: nvme needs host, the gateway")
    assert message.endswith("(tiering.host: KVTIER_TIERING__HOST, tiering.nvme: command line)")
