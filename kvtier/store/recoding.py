"""Which format a block has in each tier, and how it gets from one to the other.

An exact record is decoded and encoded again; a lossy one is copied as it is, never encoded into another format.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvtier import formats
from kvtier.errors import ConfigError, FormatMismatch
from kvtier.formats import Format
from kvtier.layout import Layout
from kvtier.tiers import BlockRef, Handle, Tier

__all__ = ["Recoder", "Target", "check_formats"]

_RAW = "raw"


class Target(NamedTuple):
    """How a block is to be stored in a tier.

    ref: as it will be there (not exact in a lossy format). fmt: format id. nbytes: size there; `variable`: at most.
    codec: what encodes on the way down and decodes on the way up; None where the bytes are copied as they are.
    group: layer group that the block is of. fallback: why it is not encoded as configured, if it is not.
    """

    ref: BlockRef
    fmt: str
    nbytes: int
    variable: bool = False
    codec: Format | None = None
    group: int = 0
    fallback: str | None = None


class _Namespace(NamedTuple):
    layout: Layout
    formats: Mapping[str, str]


def check_formats(tiers: Sequence[Tier], chosen: Mapping[str, str], *, accept_lossy: bool) -> None:
    """Refuse a choice of formats by tier name that would never be reused, or cannot be stored.

    Raises:
        ConfigError: names the tier, the format and what to do.
    """
    names = [tier.name for tier in tiers]
    for name, fmt in chosen.items():
        if name not in names:
            raise ConfigError(f"format {fmt!r} for tier {name!r}: expected one of {', '.join(names)}")
        if not formats.get(fmt).exact and not accept_lossy:
            raise ConfigError(
                f"format {fmt!r} of tier {name} is lossy, and lossy blocks are not accepted: nothing stored there "
                "would ever be reused; set accept_lossy = true, or choose raw or bitsplit"
            )


class Recoder:
    """The formats of every namespace. Thread-safe.

    Args:
        tiers: host first.
        default: tier name -> format id where a namespace's registration names none.
        accept_lossy: whether lossy formats are of any use.
    """

    def __init__(self, tiers: Sequence[Tier], default: Mapping[str, str], *, accept_lossy: bool) -> None:
        check_formats(tiers, default, accept_lossy=accept_lossy)
        self._tiers = tuple(tiers)
        self._default = dict(default)
        self._accept_lossy = accept_lossy
        self._lock = threading.Lock()
        self._namespaces: dict[int, _Namespace] = {}

    def register(self, ns: int, layout: Layout, chosen: Mapping[str, str]) -> None:
        """See `TieredStore.register`."""
        check_formats(self._tiers, chosen, accept_lossy=self._accept_lossy)
        known = _Namespace(layout, self._default | dict(chosen))
        for tier in self._tiers:
            fmt = formats.get(known.formats.get(tier.name, _RAW))
            sizes = [fmt.size(layout, group) for group in range(len(layout.groups))]
            if None in sizes and not tier.caps.variable_size:
                raise ConfigError(
                    f"format {fmt.id!r} of tier {tier.name}: its blocks differ in size, and this tier takes "
                    "fixed sizes only; use it in nvme"
                )
        with self._lock:
            before = self._namespaces.setdefault(ns, known)
            if before.layout != layout:
                raise ConfigError(f"namespace {ns} is registered with another layout: give each layout its own")
            self._namespaces[ns] = known

    def forget(self, ns: int) -> None:
        """See `TieredStore.forget`."""
        with self._lock:
            self._namespaces.pop(ns, None)

    def check(self, ref: BlockRef, nbytes: int, part: int, parts: int) -> None:
        """Refuse a raw block that is not one of its namespace.

        Raises:
            FormatMismatch: it has another size than its layout's blocks.
        """
        known = self._namespaces.get(ref.ns)
        expected = nbytes if known is None else known.layout.block_bytes(_group(known.layout, part, parts))
        if nbytes != expected or nbytes < 1:
            raise FormatMismatch(
                f"block {ref.key.hex()} has {nbytes} bytes: expected {max(expected, 1)}, as its layout says"
            )

    def of_raw(self, tier: Tier, ref: BlockRef, nbytes: int, part: int, parts: int) -> Target:
        """For a raw block that comes from outside."""
        known = self._namespaces.get(ref.ns)
        if known is None:
            return Target(ref, _RAW, nbytes)
        return self._encoded(tier, ref, known, _group(known.layout, part, parts))

    def down(self, tier: Tier, source: Handle) -> Target:
        """For a record of host that is copied to a lower tier."""
        ref, known = source.ref, self._namespaces.get(source.ref.ns)
        if known is None:
            return Target(ref, source.fmt, source.nbytes)
        group = self._group_of(source, known.layout)
        if group is None:
            # Several of one size and different shapes: bytes as they are are right in any case.
            return Target(ref, source.fmt, source.nbytes, fallback="ambiguous_group")
        wanted = self._encoded(tier, ref, known, group)
        # What a lossy format stored is never encoded again, whatever its record says of its prefix.
        if wanted.fmt == source.fmt or not formats.get(source.fmt).exact_for(known.layout, group):
            return Target(ref, source.fmt, source.nbytes)
        return wanted

    def up(self, source: Handle, host: Tier, part: int, parts: int) -> Target | None:
        """For a record of a lower tier that is copied into host; None: nobody here can decode it."""
        known = self._namespaces.get(source.ref.ns)
        if known is None:
            return Target(source.ref, source.fmt, source.nbytes) if source.fmt == _RAW else None
        fmt = formats.stored(source.fmt)
        if fmt is None:
            return None
        group = _group(known.layout, part, parts)
        fixed = fmt.size(known.layout, group)
        if fixed is None and not host.caps.variable_size:
            return Target(source.ref, _RAW, known.layout.block_bytes(group), codec=fmt, group=group)
        return Target(source.ref, source.fmt, source.nbytes) if fixed in (None, source.nbytes) else None

    def exact_in(self, tier: Tier, ref: BlockRef) -> bool:
        """Whether the best record of this block that a tier can hold is an exact one."""
        known = self._namespaces.get(ref.ns)
        if known is None or not ref.exact:
            return ref.exact
        return self._encoded(tier, ref, known, 0).ref.exact

    def encodes(self, tier: Tier, ns: int) -> bool:
        """Whether a tier keeps raw blocks of a namespace in another format."""
        known = self._namespaces.get(ns)
        return known is not None and known.formats.get(tier.name, _RAW) != _RAW

    def keeps_exact(self) -> bool:
        """Whether host stores exact blocks as such, in every namespace."""
        host = self._tiers[0].name
        with self._lock:
            chosen = {known.formats.get(host, _RAW) for known in self._namespaces.values()}
        return all(formats.get(fmt).exact for fmt in chosen | {self._default.get(host, _RAW)})

    def layout(self, ns: int) -> Layout:
        """Of a registered namespace."""
        return self._namespaces[ns].layout

    def to_raw(self, source: Handle, data: memoryview, group: int) -> memoryview:
        """The raw block of an exact record."""
        if source.fmt == _RAW:
            return data[: source.nbytes]
        layout = self.layout(source.ref.ns)
        raw = memoryview(bytearray(layout.block_bytes(group)))
        formats.get(source.fmt).decode(data[: source.nbytes], layout, raw, group)
        return raw

    def _encoded(self, tier: Tier, ref: BlockRef, known: _Namespace, group: int) -> Target:
        fmt = formats.choose(known.formats.get(tier.name, _RAW), ref.depth)
        if fmt.id == _RAW:
            return Target(ref, _RAW, known.layout.block_bytes(group), group=group)
        exact = ref.exact and fmt.exact_for(known.layout, group)
        variable = fmt.size(known.layout, group) is None
        size = fmt.bound(known.layout, group)
        return Target(ref._replace(exact=exact), fmt.id, size, variable, fmt, group)

    @staticmethod
    def _group_of(source: Handle, layout: Layout) -> int | None:
        """The layer group of a record, told by its size; None if that fits groups of different shapes."""
        fmt = formats.get(source.fmt)
        fitting = [at for at in range(len(layout.groups)) if fmt.size(layout, at) == source.nbytes]
        shapes = {
            (g.kind, g.block_shape(layout.block_size), g.dtype, g.order)
            for g in map(layout.groups.__getitem__, fitting)
        }
        return fitting[0] if len(shapes) == 1 else None


def _group(layout: Layout, part: int, parts: int) -> int:
    """Parts are ordered by group, then by shard."""
    return part * len(layout.groups) // parts if parts >= len(layout.groups) else 0
