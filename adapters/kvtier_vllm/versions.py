"""Which vLLM this adapter works with: tested with one release, and with others as far as they have what it needs."""

import logging
import re
from collections.abc import Callable
from inspect import Parameter, getmembers, signature
from typing import Any

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
_REST = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def release(version: str) -> tuple[int, int]:
    """Major and minor number. Raises `ConfigError` for what is no version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ConfigError(f"vLLM calls itself {version!r}: expected a version such as 0.32.0")
    return int(found[1]), int(found[2])


def check_version(version: str, base: type, manager: type, own: type) -> tuple[int, int]:
    """Refuse a vLLM that lacks something, or calls it otherwise; say so where it was not tested with.

    Args:
        version: `vllm.__version__`.
        base: its connector class.
        manager: its KV cache manager.
        own: the class that is to be called in the place of `base`.

    Returns:
        Major and minor number.

    Raises:
        ConfigError: it is older than what was tested, or hooks are missing, or take other arguments.
    """
    found, tested = release(version), ".".join(map(str, TESTED))
    missing = [name for name in _NEEDED if not hasattr(base, name)]
    missing += [name for name in _NEEDED_OF_MANAGER if not hasattr(manager, name)]
    changed = _changed(base, own)
    if found < TESTED or missing or changed:
        differs = [f"it lacks {', '.join(missing)}"] * bool(missing)
        differs += [f"it calls {', '.join(changed)} with other arguments"] * bool(changed)
        raise ConfigError(
            f"vLLM {version}: this version of kvtier needs {tested} or later with the same hooks"
            f"{''.join(f'; {what}' for what in differs)}; install vllm {tested}.x, or another kvtier"
        )
    if found > TESTED:
        _log.warning("vLLM %s: kvtier was tested with %s.x; it has all hooks that are needed", version, tested)
    return found


def _changed(base: type, own: type) -> list[str]:
    """Public methods of `own` that cannot take what those of `base` may be given."""
    theirs, mine = dict(getmembers(base, callable)), dict(getmembers(own, callable))
    names = [name for name in vars(own) if name in theirs and not name.startswith("_")]
    return [name for name in names if not _takes(mine[name], theirs[name])]


def _takes(own: Callable[..., Any], call: Callable[..., Any]) -> bool:
    mine, theirs = (signature(method).parameters.values() for method in (own, call))
    given = {one.name for one in theirs if one.kind not in _REST}
    needed = {one.name for one in mine if one.kind not in _REST and one.default is Parameter.empty}
    any_name = any(one.kind is Parameter.VAR_KEYWORD for one in mine)
    return needed <= given and (any_name or given <= {one.name for one in mine})
