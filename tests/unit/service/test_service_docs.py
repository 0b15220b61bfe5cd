"""What docs/service.md, the unit file and the container file say is what the service does."""

import configparser
import re
import tomllib
from pathlib import Path

import pytest
from cache_world import BLOCK

from kvtier.cli import main
from kvtier.config import load_config, settings
from kvtier.service.cache import STATUSES
from kvtier.service.cache.quotas import read_quotas

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/service.md").read_text(encoding="utf-8")


def fenced(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_every_code_is_listed_with_its_status():
    rows = re.findall(r"^\| (`[^|]+) \| (\d{3}) \|", PAGE, re.MULTILINE)
    listed = {code: int(status) for codes, status in rows for code in re.findall(r"`(\w+)`", codes)}
    assert listed == STATUSES


def test_its_settings_load_and_its_tenants_fit(tmp_path):
    config, table = fenced("toml")
    values = tomllib.loads(config)
    loaded = load_config(values, environ={}, search=False).config
    (tmp_path / "tenants.toml").write_text(table)
    service = loaded.service.model_copy(update={"tenants": tmp_path / "tenants.toml"})
    quotas = read_quotas(service, loaded.tiering)
    assert sorted(quotas) == ["team-a", "team-b"]
    assert quotas["team-b"].nvme is None


def test_its_limits_and_settings_exist():
    known = {name.rpartition(".")[2] for name in settings()}
    section = PAGE.partition("## Limits")[2].partition("A block for which")[0]
    named = {
        name for row in section.splitlines() for name in re.findall(r"`(\w+)`", row.partition("|")[2].partition("|")[0])
    }
    assert len(named) > 8
    assert named - known == set()
    dotted = set(re.findall(r"`((?:service|tiering|log)\.[a-z_.]+)`", PAGE))
    assert {name.rstrip(".") for name in dotted} - set(settings()) == set()


def test_its_commands_are_commands(tmp_path, capsys):
    place = ["--file", str(tmp_path / "tokens.json")]
    for line in fenced("bash")[1].strip().splitlines():
        words = line.replace("'", "").split()[1:]
        if "revoke" in words:
            main(["cache", "token", "list", *place])
            words[-1] = capsys.readouterr().out.splitlines()[-1].split("\t")[0]
        assert main([*words, *place]) == 0, line


@pytest.fixture
def unit():
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(ROOT / "examples/kvtier-cache.service")
    return parser["Service"]


def test_the_unit_file_has_the_directories_of_the_page(unit):
    values = tomllib.loads(fenced("toml")[0])
    places = {
        f"/var/lib/{unit['StateDirectory']}": values["service"]["state"],
        f"/var/cache/{unit['CacheDirectory']}": values["tiering"]["nvme"]["path"],
        f"/run/{unit['RuntimeDirectory']}": str(Path(values["service"]["socket"]).parent),
        f"/etc/{unit['ConfigurationDirectory']}": str(Path(values["service"]["tokens"]).parent),
    }
    assert all(here == there for here, there in places.items())
    assert int(unit["TimeoutStopSec"]) > settings()["service.drain_timeout"].default
    assert unit["ExecStart"].split()[1:] == ["--config", "/etc/kvtier/cache.toml", "cache", "serve"]


def test_the_container_file_sets_what_there_is():
    text = (ROOT / "examples/Containerfile").read_text(encoding="utf-8")
    variables = {setting.variable for setting in settings().values()}
    named = set(re.findall(r"KVTIER_\w+", text))
    assert named
    assert named - variables == set()


def test_the_environment_of_the_container_is_accepted():
    text = (ROOT / "examples/Containerfile").read_text(encoding="utf-8")
    block = text[text.index("ENV ") : text.index("VOLUME")]
    environ = dict(re.findall(r"(KVTIER_\w+)=(\S+)", block))
    config = load_config({"tiering": {"host": {"capacity": BLOCK}}}, environ=environ, search=False).config
    assert (config.service.host, str(config.service.state)) == ("0.0.0.0", "/var/lib/kvtier")
    assert str(config.tiering.nvme and config.tiering.nvme.path) == "/var/cache/kvtier"
