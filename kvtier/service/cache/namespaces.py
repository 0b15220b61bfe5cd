"""Namespaces: what clients name blocks in, and what its store namespaces are."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, overload

from kvtier.errors import FormatMismatch
from kvtier.keys import KEY_SCHEME, STORE_KEY_BYTES, Namespace, namespace_index, store_keys
from kvtier.layout import GroupKind, LayerGroup, Layout
from kvtier.service.cache.errors import ServiceError
from kvtier.tiers import record_heads

__all__ = [
    "BlockNames",
    "NamespaceInfo",
    "NamespaceSpec",
    "OpenNamespace",
    "check_name",
    "layout_as_data",
    "layout_from_data",
]

# No dot first: HTTP clients take `.` and `..` out of paths before they send them.
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_LONGEST_TEXT = 1024
_MOST_PARTS = 4096
_OPAQUE = b"opaque"
_RAW = "raw"


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """What must be equal for blocks to be reusable, and the name that clients use.

    Args:
        name: 1 to 128 of `A-Z a-z 0-9 . _ -`, no dot first.
        layout: of its blocks; None: opaque, blocks of any size that are stored as they are.
        model: fingerprint of weights and revision.
        numerics: what changes values without changing shapes.
        lora: adapter, empty for none.
        scheme: how chain keys are made; only those of `kvtier.keys.KEY_SCHEME` can be made from token ids here.

    Raises:
        ServiceError: invalid: a name or text that none can have; wrong_layout: too many parts.
    """

    name: str
    layout: Layout | None
    model: str = ""
    numerics: str = ""
    lora: str = ""
    scheme: str = KEY_SCHEME

    def __post_init__(self) -> None:
        check_name(self.name)
        for field in ("model", "numerics", "lora", "scheme"):
            text = getattr(self, field)
            if len(text) > _LONGEST_TEXT:
                raise ServiceError("invalid", f"{field} of {len(text)} characters: expected at most {_LONGEST_TEXT}")
        if self.parts > _MOST_PARTS:
            raise ServiceError("wrong_layout", f"layout of {self.parts} parts: expected at most {_MOST_PARTS}")

    @property
    def parts(self) -> int:
        """Parts that make one block ready; 1 for opaque ones."""
        return 1 if self.layout is None else self.layout.parts

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of a raw block by part; () for opaque ones."""
        if self.layout is None:
            return ()
        sizes = [self.layout.block_bytes(group) for group in range(len(self.layout.groups))]
        return tuple(sizes[part // self.layout.shards] for part in range(self.parts))

    def as_data(self) -> dict[str, Any]:
        """As JSON-able data; `from_data` reads it back."""
        return {
            "name": self.name,
            "layout": None if self.layout is None else layout_as_data(self.layout),
            "model": self.model,
            "numerics": self.numerics,
            "lora": self.lora,
            "scheme": self.scheme,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "NamespaceSpec":
        """What `as_data` made.

        Raises:
            ServiceError: invalid.
        """
        layout = data["layout"]
        return cls(**{**data, "layout": None if layout is None else layout_from_data(layout)})


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """A namespace as its users see it.

    Args:
        spec: as it was created.
        created: seconds since 1970.
        fingerprint: of its layout; None for opaque ones.
        parts: that make one block ready.
        block_bytes: by part; () for opaque ones.
        stored, hits, misses: blocks since the process began.
        stored_bytes: likewise.
        host_blocks, host_bytes: parts of blocks in host now.
    """

    spec: NamespaceSpec
    created: float
    fingerprint: bytes | None
    parts: int
    block_bytes: tuple[int, ...]
    stored: int = 0
    stored_bytes: int = 0
    hits: int = 0
    misses: int = 0
    host_blocks: int = 0
    host_bytes: int = 0


class BlockNames(NamedTuple):
    """Parts of blocks, as clients name them by chain keys: a column for each field. No parent: none, or unknown."""

    keys: Sequence[bytes]
    parts: Sequence[int]
    parents: Sequence[bytes | None]


class OpenNamespace:
    """A namespace of one tenant in its store: one store namespace per part, so that each has a layout of its own.

    Args:
        spec: what it is.
        salt: the tenant's secret.
        created: seconds since 1970.

    Attributes:
        used: when it last was, by its tenant's clock; the tenant's to set.
    """

    __slots__ = ("created", "indices", "masks", "spec", "used")

    def __init__(self, spec: NamespaceSpec, salt: bytes, created: float) -> None:
        self.spec = spec
        self.created = created
        self.used = 0.0
        layout = spec.layout
        fingerprint = _OPAQUE if layout is None else layout.fingerprint
        # The name is salted too: a token for one namespace must not reach another's blocks by naming an equal one.
        named = f"{salt.hex()}/{spec.name}"
        whole = Namespace(spec.model, fingerprint, spec.numerics, spec.lora, named, spec.scheme)
        shards = 1 if layout is None else layout.shards
        self.masks = tuple(whole.mask(*divmod(part, shards)) for part in range(spec.parts))
        self.indices = tuple(namespace_index(_part_digest(whole.digest, part)) for part in range(spec.parts))

    @property
    def parts(self) -> int:
        """See `NamespaceSpec.parts`."""
        return len(self.masks)

    def layout(self, part: int) -> Layout | None:
        """Of the blocks of one part alone; None for opaque ones."""
        whole = self.spec.layout
        return None if whole is None else Layout(whole.block_size, (whole.groups[part // whole.shards],))

    def keys(self, chain: Sequence[bytes], parts: Sequence[int] | None = None) -> list[bytes]:
        """Store keys of chain keys, block-major, of all parts or of some."""
        masks = self.masks if parts is None else [self.masks[part] for part in parts]
        if len(masks) == 1:
            return store_keys(chain, masks[0])
        return [key for block in zip(*(store_keys(chain, mask) for mask in masks), strict=True) for key in block]

    def probes(self, chain: Sequence[bytes]) -> "Sequence[bytes]":
        """As `keys` of all parts, each made when it is looked at: a look-up that gallops looks at few."""
        return _Probes(chain, tuple(int.from_bytes(mask, "little") for mask in self.masks))

    def chosen(self, parts: Sequence[int] | None) -> tuple[int, ...]:
        """Which parts are meant; None: all.

        Raises:
            ServiceError: invalid: none, or one of them twice; unknown_block: no such part.
        """
        chosen = tuple(range(self.parts)) if parts is None else tuple(parts)
        if not chosen or len(set(chosen)) < len(chosen):
            raise ServiceError("invalid", f"parts {list(chosen)}: expected at least one, and each once")
        if not set(chosen) <= set(range(self.parts)):
            raise ServiceError("unknown_block", f"parts {list(chosen)}: the namespace has 0..{self.parts - 1}")
        return chosen

    def by_part(self, parts: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """Each part that there is, with its places among these: keys are masked fastest a part at a time."""
        for part in set(parts).intersection(range(self.parts)):
            yield part, [at for at, of in enumerate(parts) if of == part]

    def heads(self, names: BlockNames) -> list[bytes | None]:
        """`tiers.checksum_head` of each, as a raw record; None: there is no such part."""
        heads: list[bytes | None] = [None] * len(names.keys)
        for part, places in self.by_part(names.parts):
            keys = store_keys([names.keys[at] for at in places], self.masks[part])
            for at, head in zip(places, record_heads(keys, self.indices[part], _RAW), strict=True):
                heads[at] = head
        return heads

    def above(self, names: BlockNames) -> list[bytes]:
        """Store keys of the parents that are not among them, one for each of their children."""
        inside = set(zip(names.parts, names.keys, strict=True))
        named = zip(names.parts, names.parents, strict=True)
        outside = [(part, key) for part, key in named if key is not None and (part, key) not in inside]
        above: list[bytes] = []
        for part, places in self.by_part([part for part, _ in outside]):
            above += store_keys([outside[at][1] for at in places], self.masks[part])
        return above

    def masked(self, keys: Sequence[bytes | None], part: int) -> list[bytes | None]:
        """From chain keys to a part's store keys, or from these back to the first 16 bytes of the chain keys."""
        masked = iter(store_keys([key for key in keys if key is not None], self.masks[part]))
        return [None if key is None else next(masked) for key in keys]

    def info(self) -> NamespaceInfo:
        """As its users see it, without counts."""
        layout = self.spec.layout
        fingerprint = None if layout is None else layout.fingerprint
        return NamespaceInfo(self.spec, self.created, fingerprint, self.parts, self.spec.block_bytes)


class _Probes(Sequence[bytes]):
    """Store keys of chain keys, block-major."""

    __slots__ = ("_chain", "_masks")

    def __init__(self, chain: Sequence[bytes], masks: tuple[int, ...]) -> None:
        self._chain = chain
        self._masks = masks

    def __len__(self) -> int:
        return len(self._chain) * len(self._masks)

    @overload
    def __getitem__(self, at: int) -> bytes: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[bytes]: ...

    def __getitem__(self, at: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(at, slice):
            first, parts = at.indices(len(self))[0], len(self._masks)
            whole = at.stop is None and at.step is None and first % parts == 0
            return _Probes(self._chain[first // parts :], self._masks) if whole else list(self)[at]
        block, part = divmod(at, len(self._masks))
        head = int.from_bytes(self._chain[block][:STORE_KEY_BYTES], "little")
        return (head ^ self._masks[part]).to_bytes(STORE_KEY_BYTES, "little")


def _part_digest(digest: bytes, part: int) -> bytes:
    return hashlib.sha256(b"kvtier.part.1\0" + digest + part.to_bytes(4, "little")).digest()


def check_name(name: str) -> None:
    """Let a proper name of a namespace pass.

    Raises:
        ServiceError: invalid.
    """
    if _NAME.fullmatch(name) is None:
        raise ServiceError("invalid", "namespace: expected 1 to 128 of A-Z a-z 0-9 . _ -, no dot first")


def layout_as_data(layout: Layout) -> dict[str, Any]:
    """A layout as JSON-able data."""
    data: dict[str, Any] = json.loads(json.dumps(asdict(layout)))
    return data


def layout_from_data(data: Mapping[str, Any]) -> Layout:
    """What `layout_as_data` made, or a client wrote; what has a default may be absent.

    Raises:
        ServiceError: invalid.
    """
    try:
        groups = tuple(_group(one) for one in data["groups"])
        return Layout(groups=groups, **_numbers({name: value for name, value in data.items() if name != "groups"}))
    except (KeyError, TypeError, ValueError, FormatMismatch) as error:
        raise ServiceError("invalid", f"layout: {error}: expected {{block_size, groups, shards}}") from error


def _numbers(data: Mapping[str, Any]) -> Mapping[str, int]:
    wrong = [name for name, value in data.items() if not _whole(value)]
    if wrong:
        raise TypeError(f"{', '.join(wrong)}: expected whole numbers")
    return data


def _group(data: Mapping[str, Any]) -> LayerGroup:
    wrong = [name for name in ("planes", "kv_heads", "head_dim", "rope_dim") if not _whole(data.get(name, 0))]
    window = data.get("window")
    if wrong or not (window is None or _whole(window)) or not all(map(_whole, data["layers"])):
        raise TypeError(f"group {dict(data)}: expected whole numbers for {', '.join(wrong) or 'layers and window'}")
    if not all(isinstance(data.get(name, ""), str) for name in ("dtype", "order")):
        raise TypeError(f"group {dict(data)}: expected texts for dtype and order")
    return LayerGroup(**{**data, "kind": GroupKind(data["kind"]), "layers": tuple(data["layers"])})


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
