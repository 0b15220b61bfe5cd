"""`kvtier serve`: what is refused before a model is loaded."""

import socket
import subprocess
import sys

import pytest

from kvtier.cli import main
from kvtier.errors import ConfigError
from kvtier.http.keys import read_api_keys


@pytest.fixture(autouse=True)
def _no_model(monkeypatch):
    def fail(*arguments):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("kvtier.cli.serve.open_llm", fail)


def serve(capsys, *arguments):
    code = main(["serve", *arguments])
    return code, capsys.readouterr().err


def test_an_address_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, err = serve(capsys, "--port", str(port))
    assert code == 2
    assert f"server.port = {port}: Address already in use: choose others" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "no.such.host.invalid"], "server.host = 'no.such.host.invalid'"),
        (["--host", "192.0.2.1"], "server.host = '192.0.2.1'"),
        (["--port", "70000"], "server.port = 70000 (command line)"),
        (["--host", ""], "server.host = '' (command line): expected a name"),
        (["--api-key", " "], "--api-key: expected a key"),
        (["--api-key-file", "gone"], "server.api_key_file gone"),
    ],
)
def test_settings_that_are_wrong(capsys, arguments, says):
    code, err = serve(capsys, *arguments)
    assert code == 2
    assert says in err


def test_keys_of_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# rotated monthly\n\n  one \ntwo\n")
    assert read_api_keys(path) == ("one", "two")
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match="at least one key"):
        read_api_keys(path)


def test_without_its_packages_the_extra_is_named():
    code = "import sys; sys.modules['fastapi'] = None; from kvtier.cli import main; sys.exit(main(['serve']))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr == "error: server: fastapi is missing: pip install 'kvtier[server]'\n"
