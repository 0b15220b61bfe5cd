"""Where LMCache is: in an environment of its own, which benchmarks/requirements-lmcache.txt says how to make."""

import os
from pathlib import Path

__all__ = ["ENVIRON", "MISSING", "PYTHON"]

PYTHON = Path(__file__).parents[1] / "build/lmcache-venv/bin/python"
MISSING = "LMCache 0.5.6 (not installed: see benchmarks/requirements-lmcache.txt)"
ENVIRON = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
"""Variables of its processes: nothing is sent anywhere, and only errors are logged."""
