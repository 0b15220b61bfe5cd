"""Which vLLM this adapter works with: tested with one release, and with others as far as they have what it needs."""

import logging
import re

from kvtier.errors import ConfigError

__all__ = ["TESTED", "check_version", "release"]

_log = logging.getLogger(__name__)

TESTED = (0, 32)

_NEEDED = (
    "bind_connector_metadata",
    "bind_kv_cache_manager",
    "build_connector_meta",
    "build_connector_worker_meta",
    "get_block_ids_with_load_errors",
    "get_finished",
    "get_handshake_metadata",
    "get_num_new_matched_tokens",
    "handle_preemptions",
    "register_kv_caches",
    "set_xfer_handshake_metadata_pp_aware",
    "start_load_kv",
    "update_connector_output",
    "update_state_after_alloc",
    "wait_for_save",
)
_NEEDED_OF_MANAGER = ("evict_blocks", "get_block_ids")


def release(version: str) -> tuple[int, int]:
    """Major and minor number. Raises `ConfigError` for what is no version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ConfigError(f"vLLM calls itself {version!r}: expected a version such as 0.32.0")
    return int(found[1]), int(found[2])


def check_version(version: str, base: type, manager: type) -> tuple[int, int]:
    """Refuse a vLLM that lacks something; say so where it was not tested with.

    Args:
        version: `vllm.__version__`.
        base: its connector class.
        manager: its KV cache manager.

    Returns:
        Major and minor number.

    Raises:
        ConfigError: it is older than what was tested, or hooks are missing.
    """
    found, tested = release(version), ".".join(map(str, TESTED))
    missing = [name for name in _NEEDED if not hasattr(base, name)]
    missing += [name for name in _NEEDED_OF_MANAGER if not hasattr(manager, name)]
    if found < TESTED or missing:
        lacks = ", ".join(missing) or "nothing that is known of"
        raise ConfigError(
            f"vLLM {version}: this version of kvtier needs {tested} or later with the same hooks (it lacks {lacks}); "
            f"install vllm {tested}.x, or another kvtier"
        )
    if found > TESTED:
        _log.warning("vLLM %s: kvtier was tested with %s.x; it has all hooks that are needed", version, tested)
    return found
