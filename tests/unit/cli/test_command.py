import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from kvtier import __version__
from kvtier.cli import main
from kvtier.cli.lazy import COMMANDS, Entry
from kvtier.cli.loading import configured
from kvtier.cli.session import Session
from kvtier.config import Config, LoadedConfig
from kvtier.errors import ConfigError, KVTierError, TierUnavailable


@pytest.fixture(autouse=True)
def _isolated(tmp_path, monkeypatch):
    """No configuration but the test's own."""
    for name in list(os.environ):
        if name.startswith(("KVTIER_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def run(capsys, *arguments):
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def child(code, **options):
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


# ---- help and laziness


def test_help_lists_every_command_and_imports_none_of_them():
    code = (
        "import sys; from kvtier.cli import main; code = main(['--help']);"
        "heavy = ('torch', 'lmdb', 'kvtier.cli.demo', 'kvtier.cli.models', 'kvtier.api');"
        "print([name for name in heavy if name in sys.modules]);"
        "sys.exit(code)"
    )
    process = child(code)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[-1] == "[]"
    for name, entry in COMMANDS.items():
        assert name in out
        assert entry.summary in out


def test_the_demo_leaves_torch_to_its_processes():
    process = child("import sys, kvtier.cli.demo; sys.exit('torch' in sys.modules)")
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


def test_without_a_command_help_is_printed(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    assert out == run(capsys, "--help")[1]


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"kvtier {__version__}\n", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_of_its_own(capsys, name):
    code, out, err = run(capsys, name, "--help")
    assert (code, err) == (0, "")
    assert f"kvtier {name}" in out


# ---- kvtier config


def test_config_prints_toml_that_is_the_configuration_in_force(capsys, monkeypatch):
    monkeypatch.setenv("KVTIER_TIERING__HOST__CAPACITY", "3GiB")
    code, out, err = run(capsys, "--log-level", "info", "config")
    assert (code, err) == (0, "")
    printed = tomllib.loads(out)
    assert printed["tiering"]["host"]["capacity"] == "3GiB"
    assert printed["log"]["level"] == "info"
    assert printed["engine"]["block_size"] == 16


def test_config_explain_says_where_each_value_comes_from(capsys, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[engine]\nblock_size = 32\n")
    _, out, _ = run(capsys, "--config", str(file), "--log-level", "error", "config", "--explain")
    # Of settings of one name in several sections the first counts.
    lines = reversed(out.splitlines())
    sources = {line.split(" = ")[0]: line.split("  # ")[1] for line in lines if " = " in line}
    assert (sources["block_size"], sources["level"], sources["format"]) == (str(file), "command line", "default")


def test_config_json_is_one_object(capsys, tmp_path):
    _, out, _ = run(capsys, "config", "--json")
    row = json.loads(out)
    assert row == {"config": json.loads(Config().model_dump_json())}
    (tmp_path / "kvtier.toml").write_text('[log]\nformat = "json"\n')
    row = json.loads(run(capsys, "config", "--json", "--explain")[1])
    assert (row["file"], row["origins"]["log.format"]) == ("kvtier.toml", "kvtier.toml")


# ---- --set


def test_set_takes_every_setting_and_the_last_of_a_name_wins(capsys, monkeypatch):
    monkeypatch.setenv("KVTIER_ENGINE__ORDER", "slack")
    given = ["engine.order=fcfs", "engine.order = priority", "tiering.host=none", "server.served_model_name=a=b"]
    code, out, err = run(capsys, *(part for text in given for part in ("--set", text)), "config", "--json", "--explain")
    assert (code, err) == (0, "")
    row = json.loads(out)
    assert row["config"]["engine"]["order"] == "priority"
    assert row["config"]["tiering"]["host"] is None
    assert row["config"]["server"]["served_model_name"] == "a=b"
    assert row["origins"]["engine.order"] == row["origins"]["tiering.host"] == "command line"


def test_a_commands_own_flags_come_before_set():
    session = Session.start(None, "error", ("server.port=1", "server.host=0.0.0.0", "log.level=info"))
    config = configured(session, None, {"server": {"port": 2, "host": None}})
    assert (config.server.port, config.server.host, config.log.level) == (2, "0.0.0.0", "error")


def test_set_reaches_a_file_that_a_command_names(capsys, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[tiering.nvme]\npath = 'n'\n")
    code, _, err = run(capsys, "--set", "tiering.host=none", "doctor", "--config", str(file))
    assert code == 2
    assert "tiering.host: command line" in err
    assert f"tiering.nvme: {file}" in err


# ---- how errors end a run


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["konfig"], "No such command 'konfig'. See `kvtier --help`."),
        (["config", "--jsn"], "See `kvtier config --help`."),
        (["config", "surplus"], "surplus"),
        (["--config"], "requires an argument"),
        (["--config", "gone.toml", "config"], "config file gone.toml: No such file or directory"),
        (["--log-level", "loud", "config"], "log.level = 'loud' (command line): expected 'debug'"),
        (["--set", "engine.order", "config"], "'engine.order' (command line): expected section.field=value"),
        (["--set", "engine.ordr=slack", "config"], "engine.ordr (command line): unknown setting; did you mean"),
        (["--set", "engine.order=loud", "config"], "engine.order = 'loud' (command line): expected 'fcfs'"),
        (["--set", "engine=3", "config"], "engine = '3' (command line): expected a table of settings"),
        (["model", "path"], "fetch it with `kvtier model get`"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(capsys, arguments, says):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1


def fails_with(error):
    raise error


class Failures:
    """Commands as `COMMANDS` names them: attributes of a module."""

    @staticmethod
    def config():
        fails_with(ConfigError("a.b = 3: expected\n  4"))

    @staticmethod
    def tier():
        fails_with(TierUnavailable("/dev/x: gone"))

    @staticmethod
    def other():
        fails_with(KVTierError("odd"))

    @staticmethod
    def interrupt():
        raise KeyboardInterrupt

    @staticmethod
    def defect():
        fails_with(ZeroDivisionError("a defect"))

    @staticmethod
    def full():
        with Path("/dev/full").open("wb", 0) as file:
            file.write(b"x")


@pytest.fixture
def failing(monkeypatch):
    monkeypatch.setitem(sys.modules, "failures", Failures)
    for name in ("tier", "other", "interrupt", "defect", "full"):
        monkeypatch.setitem(COMMANDS, name, Entry(f"failures:{name}", "Fails."))
    monkeypatch.setitem(COMMANDS, "wrong", Entry("failures:config", "Fails."))


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("wrong", 2, "error: a.b = 3: expected 4\n"),
        ("tier", 1, "error: /dev/x: gone\n"),
        ("other", 2, "error: odd\n"),
        ("interrupt", 130, "interrupted\n"),
    ],
)
def test_errors_are_one_line_and_have_a_code(capsys, failing, name, code, line):
    assert run(capsys, name) == (code, "", line)


def test_debug_shows_the_traceback(capsys, failing):
    code, _, err = run(capsys, "--log-level", "debug", "tier")
    assert code == 1
    assert "Traceback (most recent call last)" in err
    assert err.endswith("error: /dev/x: gone\n")


def test_debug_shows_the_traceback_of_an_error_in_the_configuration(capsys, monkeypatch):
    monkeypatch.setenv("KVTIER_ENGINE__SEED", "x")
    code, _, err = run(capsys, "--log-level", "debug", "config")
    assert (code, "Traceback" in err) == (2, True)


def test_a_defect_is_not_hidden(failing):
    with pytest.raises(ZeroDivisionError):
        main(["defect"])


CONFIG = "import sys; from kvtier.cli import main; sys.exit(main(['config', '--explain']))"


def to(stdout, code=CONFIG):
    """Exit code and errors of a child whose standard output is this."""
    process = subprocess.run(
        [sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    return process.returncode, process.stderr


def test_a_reader_that_leaves_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    assert to(write) == (1, "")
    os.close(write)


@pytest.mark.parametrize("code", [CONFIG, CONFIG.replace(", '--explain'", "")])
def test_a_full_disk_under_standard_output_is_one_line(code):
    said = "error: standard output: No space left on device: expected a place that takes what is written to it\n"
    with Path("/dev/full").open("w") as full:
        assert to(full, code) == (1, said)


def test_another_file_s_full_disk_is_not_taken_for_standard_output_s(failing):
    with pytest.raises(OSError, match="No space left"):
        main(["full"])


def test_standard_output_that_is_closed_is_said_first():
    status, told = to(None, f"import os; os.close(1); import sys; sys.stdout = None; {CONFIG}")
    assert (status, told.partition(":")[0], told.count("\n")) == (2, "error", 1)
    assert "standard output is closed" in told


def test_an_interrupt_while_a_command_waits_is_one_line_and_130(tmp_path):
    lock = tmp_path / "models/.lock"
    lock.parent.mkdir()
    code = (
        # A test-suite in the background of a shell inherits an ignored SIGINT.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "import sys; from kvtier.cli import main; import kvtier.cli.models; print('up', flush=True);"
        "sys.exit(main(['model', 'get']))"
    )
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # another process is fetching: the command waits for it
        process = child(code, env=os.environ | {"KVTIER_CACHE_DIR": str(tmp_path)})
        process.stdout.readline()
        wait_until_blocked(process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


def wait_until_blocked(pid):
    """Until the process waits for a file lock, as /proc/locks shows it."""
    while True:  # the test's own time limit ends it
        if any("->" in line and f" {pid} " in line for line in Path("/proc/locks").read_text().splitlines()):
            return
        time.sleep(0.01)


# ---- a configuration file that is broken, or not this process's own


@pytest.mark.parametrize("arguments", [("config", "--help"), ("model", "path", "--help"), ("demo", "-h")])
def test_help_of_a_command_needs_no_valid_configuration(capsys, tmp_path, arguments):
    file = tmp_path / "broken.toml"
    file.write_text("[engine]\nblock_sise = 3\n")
    code, out, err = run(capsys, "--config", str(file), *arguments)
    assert (code, err) == (0, "")
    assert "Usage: kvtier" in out
    code, _, err = run(capsys, "--config", str(file), "config")
    assert code == 2
    assert "did you mean engine.block_size?" in err


@pytest.mark.parametrize(
    ("assigned", "says"),
    [
        ((), r"engine\.seed = -7 \(.*mine\.toml\)"),
        (("engine.seed = -9",), r"engine\.seed = '-9' \(KVTIER_ENGINE__SEED"),
    ],
)
def test_the_demo_runs_its_processes_under_the_same_settings(tmp_path, assigned, says):
    from kvtier.cli.demo import _session
    from kvtier.cli.demo_session import Orders

    file = tmp_path / "mine.toml"
    file.write_text("[engine]\nblock_size = 16\nseed = -7\n")
    orders = Orders({"model": {"path": str(tmp_path / "no model")}}, "", [], [], 1)
    session = Session(LoadedConfig(Config(), {}, file), assigned)
    with pytest.raises(KVTierError, match=says):
        list(_session(orders, session.environ()))
