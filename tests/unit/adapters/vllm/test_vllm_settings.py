"""Settings from vLLM's extra config, and which vLLM is taken."""

import logging

import pytest
from kvtier_vllm.settings import read_settings
from kvtier_vllm.versions import _NEEDED, _NEEDED_OF_MANAGER, check_version

from kvtier.errors import ConfigError


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVTIER_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_nothing_is_enough():
    settings = read_settings({})
    assert (settings.load, settings.salt, settings.model) == ("auto", "", None)
    assert settings.tiering.host.capacity == 1 << 30
    assert settings.tiering.nvme is None


def test_the_tiering_section_and_the_connectors_own_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_TIERING__HOST__CAPACITY", "2GiB")
    monkeypatch.setenv("KVTIER_TIERING__LOAD_DEADLINE", "3")
    extra = {
        "host": {"capacity": "512MiB"},
        "nvme": {"path": str(tmp_path)},
        "load": "async",
        "salt": "s",
        "model": "m",
    }
    settings = read_settings(extra, "fail")
    assert (settings.load, settings.salt, settings.model, settings.policy) == ("async", "s", "m", "fail")
    assert settings.tiering.host.capacity == 512 << 20
    assert settings.tiering.nvme.path == tmp_path
    assert settings.tiering.load_deadline == 3


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"loads": "sync"}, "tiering.loads .*unknown setting"),
        ({"host": {"capacty": "1GiB"}}, "did you mean"),
        ({"host": {"capacity": "much"}}, "tiering.host.capacity"),
        ({"host": None}, "nothing to connect"),
        ({"host": {"copies": "exclusive"}}, "use 'inclusive'"),
        ({"load": "soon"}, "load = 'soon': expected auto or sync or async"),
        ({"salt": 5}, "salt = 5: expected a text"),
        ({"model": ""}, "model = ''"),
    ],
)
def test_mistakes_are_named(extra, message):
    with pytest.raises(ConfigError, match=message):
        read_settings(extra)


def _hook(self):
    """Of no arguments."""


class _Base:
    """Has all hooks."""

    def start_load_kv(self, forward_context, **kwargs): ...

    def get_num_new_matched_tokens(self, request, num_computed_tokens): ...


for _name in {*_NEEDED, *_NEEDED_OF_MANAGER} - set(vars(_Base)):
    setattr(_Base, _name, _hook)


class _Own(_Base):
    def start_load_kv(self, forward_context, **kwargs): ...

    def get_num_new_matched_tokens(self, request, num_computed_tokens): ...


def _later(**hooks):
    return type("Later", (_Base,), hooks)


def test_the_tested_release_and_later_ones_are_taken(caplog):
    with caplog.at_level(logging.WARNING):
        assert check_version("0.32.4+cpu", _Base, _Base, _Own) == (0, 32)
    assert not caplog.records
    assert check_version("1.0.0rc1", _Base, _Base, _Own) == (1, 0)
    assert "tested with 0.32" in caplog.text
    # What takes any name takes a new one.
    later = _later(start_load_kv=lambda self, forward_context, step, **kwargs: None)
    assert check_version("0.33.0", later, _Base, _Own) == (0, 33)


def test_what_lacks_something_is_refused():
    with pytest.raises(ConfigError, match=r"needs 0\.32"):
        check_version("0.31.9", _Base, _Base, _Own)
    with pytest.raises(ConfigError, match="lacks bind_connector_metadata, "):
        check_version("0.33.0", object, _Base, _Own)
    with pytest.raises(ConfigError, match="lacks evict_blocks"):
        check_version("0.33.0", _Base, object, _Own)
    with pytest.raises(ConfigError, match="expected a version"):
        check_version("dev", _Base, _Base, _Own)


@pytest.mark.parametrize(
    "hook",
    [
        lambda self, request, num_computed_tokens, more: None,
        lambda self, request, computed: None,
        lambda self, request: None,
        lambda self, request, num_computed_tokens, *, group=0: None,
    ],
)
def test_a_hook_that_takes_other_arguments_is_refused(hook):
    with pytest.raises(ConfigError, match="calls get_num_new_matched_tokens with other arguments"):
        check_version("0.33.0", _later(get_num_new_matched_tokens=hook), _Base, _Own)
