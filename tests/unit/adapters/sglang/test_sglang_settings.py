"""SGLang's extra config is the `tiering` section, and what is wrong in it is said before anything is opened."""

import json
import re
from pathlib import Path

import pytest
from kvtier_sglang.settings import read_settings

from kvtier.errors import ConfigError

OWN = {"backend_name": "kvtier", "module_path": "kvtier_sglang", "class_name": "KVTierStorage", "interface_v1": 1}


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """No configuration file of whoever runs the tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_the_sections_of_tiering_stand_beside_sglangs_own_keys(tmp_path):
    settings = read_settings(
        OWN
        | {
            "host": {"capacity": "64MiB"},
            "nvme": {"path": str(tmp_path / "kv"), "capacity": "2GiB", "format": "bitsplit"},
            "load_deadline": 3,
            "salt": "revision 7",
        }
    )
    assert settings.salt == "revision 7"
    assert settings.tiering.host.capacity == 64 << 20
    assert settings.tiering.nvme.capacity == 2 << 30
    assert settings.tiering.nvme.format == "bitsplit"
    assert settings.tiering.load_deadline == 3.0


def test_the_environment_fills_in(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_TIERING__NVME__PATH", str(tmp_path / "kv"))
    assert read_settings(OWN).tiering.nvme.path == tmp_path / "kv"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"nvmee": {"path": "/x"}}, r"tiering\.nvmee .*unknown setting; did you mean tiering\.nvme"),
        (
            {"nvme": {"path": "/x", "capacty": "1GiB"}},
            r"nvme\.capacty .*unknown setting; did you mean .*nvme\.capacity",
        ),
        ({"nvme": {"path": "/x", "capacity": "many"}}, r"tiering\.nvme\.capacity = 'many'"),
        ({"nvme": {"path": "/x"}, "host": None}, "nvme needs host"),
        ({"host": {"capacity": "1GiB"}}, r"neither nvme\.path nor remote\.url"),
        (None, r"neither nvme\.path nor remote\.url"),
        ({"nvme": {"path": "/x"}, "salt": 7}, "salt = 7: expected a text"),
        ({"nvme": {"path": "/x"}, "prefetch": "next_turn"}, "SGLang says no sessions"),
    ],
)
def test_what_is_wrong_is_refused(extra, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_settings(None if extra is None else OWN | extra)
    assert str(caught.value).startswith("--hicache-storage-backend-extra-config: ")


def test_the_settings_of_the_manual_are_good_ones():
    page = (Path(__file__).parents[4] / "docs" / "sglang.md").read_text(encoding="utf-8")
    extra = json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])
    assert extra.keys() >= OWN.keys()
    tiering = read_settings(extra).tiering
    assert (tiering.host.capacity, tiering.nvme.capacity) == (1 << 30, 200 << 30)
