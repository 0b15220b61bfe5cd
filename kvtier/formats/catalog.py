"""Formats by name, the format of a block at a depth, and the order of fidelity."""

import threading

from kvtier.errors import ConfigError
from kvtier.formats.base import Format
from kvtier.plugins import Registry

__all__ = ["choose", "fidelity", "get", "names", "stored"]

_registry: Registry[Format] = Registry(
    "kvtier.formats",
    {
        "raw": "kvtier.formats.raw:RawFormat",
        "bitsplit": "kvtier.formats.bitsplit:BitsplitFormat",
        "int8r": "kvtier.formats.quantized:Int8RotatedFormat",
        "int8": "kvtier.formats.quantized:Int8Format",
        "fp8": "kvtier.formats.quantized:Fp8Format",
        "k8v4": "kvtier.formats.quantized:K8V4Format",
        "int4r": "kvtier.formats.quantized:Int4RotatedFormat",
        "mla8": "kvtier.formats.quantized:Mla8Format",
        "mla4": "kvtier.formats.quantized:Mla4Format",
    },
)
_EXPECTED = "a class of kvtier.formats.Format, called without arguments"
_formats: dict[str, Format] = {}
_lock = threading.Lock()


def names() -> tuple[str, ...]:
    """Ids of every known format."""
    return _registry.names()


def get(format_id: str) -> Format:
    """The one instance of a format; "module:Class" makes a third party's known under its own id too.

    Raises:
        ConfigError: unknown id, or a class that is no usable format.
    """
    found = _formats.get(format_id)
    return found if found is not None else _make(format_id)


def stored(format_id: str) -> Format | None:
    """The format that a record says it is in, or None for one that this process does not know.

    Unlike with `get`, a name of the kind "module:Class" imports nothing: whoever can write to a tier's directory must
    not choose what code runs here.
    """
    found = _formats.get(format_id)
    return get(format_id) if found is None and format_id in _registry.names() else found


def choose(format_id: str, depth: int) -> Format:
    """The format for a block at this depth of its chain (`BlockRef.depth`), where a tier is set to `format_id`.

    The first block of a chain is an attention sink: every later token reads it, and an error there is a bias
    rather than noise. It is kept at 8 bits or more. A block whose parent is unknown (depth -1) may be such a
    block and takes exact formats only.

    Raises:
        ConfigError: unknown id.
    """
    wanted = get(format_id)
    if depth < 0:
        return wanted if wanted.exact else get("raw")
    return get(wanted.sink) if depth == 0 else wanted


def fidelity(format_id: str) -> int:
    """How close to the computed KV a format's bytes are; 0 for a format that this process does not know."""
    found = stored(format_id)
    return 0 if found is None else found.fidelity


def _make(format_id: str) -> Format:
    try:
        made = _registry.get(format_id)()
    except TypeError as error:
        raise ConfigError(f"format {format_id!r} cannot be made ({error}): expected {_EXPECTED}") from error
    if not callable(getattr(made, "decode", None)):
        raise ConfigError(f"format {format_id!r} is a {type(made).__name__}: expected {_EXPECTED}")
    if not (made.id.isascii() and 1 <= len(made.id) <= 16):
        raise ConfigError(f"format id {made.id!r} of {format_id!r}: expected 1 to 16 ASCII characters")
    named = ":" not in format_id
    if (named and made.id != format_id) or (not named and made.id in _registry.names()):
        raise ConfigError(f"format {format_id!r} calls itself {made.id!r}: expected an id of its own, and that one")
    with _lock:
        known = _formats.setdefault(made.id, made)
        if type(known) is not type(made):
            raise ConfigError(f"format id {made.id!r}: {type(known)} has it already; give {format_id!r} another id")
        return _formats.setdefault(format_id, known)
