"""Fixtures of the whole test-suite, and the environment it runs in."""

import logging
import os

# Before torch is imported: one thread (two test runs on two cores slow each other down at OpenMP's barriers),
# and Triton's interpreter, whose flag is read when a kernel is decorated.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from kvtier.engine.models.catalog import cache_dir, fetch_default_model
from kvtier.errors import ModelError

# A machine that is busy otherwise makes an example slow, not wrong.
settings.register_profile("kvtier", deadline=None)
settings.load_profile("kvtier")

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def _pristine_log() -> Iterator[None]:
    """The kvtier logger as it was, also after a command has set it up: its stream ends with the test."""
    logger = logging.getLogger("kvtier")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.propagate = propagate
    logger.handlers[:] = handlers


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Directory of SmolLM2-135M-Instruct, fetched into the user's cache; skips where it cannot be had.

    With KVTIER_REQUIRE_MODEL=1 its absence is a failure.
    """
    try:
        return fetch_default_model(cache_dir(), lambda stage, fraction: None)
    except ModelError as error:
        if os.environ.get("KVTIER_REQUIRE_MODEL") == "1":
            raise
        pytest.skip(f"the default model cannot be had: {error}")
