"""Looking up, leasing, pinning, and letting go: who holds what, in which tiers."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from kvtier.errors import RequestError
from kvtier.metrics import Metrics
from kvtier.store.lanes import Steps
from kvtier.store.lease import Lease
from kvtier.store.lookup import leading_run
from kvtier.store.port import Port
from kvtier.store.runs import columns, interleaved, run_ends
from kvtier.tiers import BlockRef, Handle, Owner, Tier

__all__ = ["Leases", "Pins"]

_FEW_BLOCKS, _FEW_KEYS = 16, 256


class Leases:
    """Every lease of a store, by owner. Thread-safe.

    Args:
        ports: fastest first.
    """

    def __init__(self, ports: Sequence[Port]) -> None:
        self._ports = tuple(ports)
        self._order = tuple(port.name for port in ports)
        self._lock = threading.Lock()
        self._held: dict[Owner, set[Lease]] = {}

    # ---- looking up

    def match(
        self, keys: Sequence[bytes], parts: int, *, exact: bool, depth: int = 0, remote: bool = True
    ) -> list[str]:
        """Tier of each block of the leading run; see `TieredStore.match`."""
        names: list[str] = []
        for _ in self.matching(names, keys, parts, exact=exact, depth=depth, remote=remote):
            pass
        return names

    def find(self, names: list[str], keys: Sequence[bytes], parts: int, *, exact: bool, depth: int) -> Steps[None]:
        """`match`, appending to `names`; asks remote tiers in threads of their own."""
        for port in self.matching(names, keys, parts, exact=exact, depth=depth):
            if port.tier.caps.remote:
                yield port.lookups

    def matching(
        self, names: list[str], keys: Sequence[bytes], parts: int, *, exact: bool, depth: int, remote: bool = True
    ) -> Iterator[Port]:
        """Append the tier of each block of the leading run to `names`; says whom it asks next."""
        ports = [port for port in self._ports if remote or not port.tier.caps.remote]
        blocks, found = len(keys) // parts, 0
        idle = 0
        while found < blocks and idle < len(ports):
            for port in ports:
                yield port
                run = self._run(port, keys[found * parts :] if found else keys, parts, exact=exact, depth=depth + found)
                names += [port.name] * run
                found += run
                # Its own run has just ended: only another tier can go on.
                idle = 1 if run else idle + 1
                if found == blocks or idle == len(ports):
                    break
            if idle == len(ports) and found < blocks and parts > 1:
                block = keys[found * parts : (found + 1) * parts]
                spread = self._spread(ports, block, exact=exact, depth=depth + found)
                if spread is not None:
                    names.append(spread)
                    found, idle = found + 1, 0

    def whereabouts(self, names: list[str | None], keys: Sequence[bytes], *, exact: bool) -> Steps[list[str | None]]:
        """Fill in the fastest tier of each key, each by itself; asks remote tiers in threads of their own."""
        missing = list(range(len(keys)))
        for port in self._ports:
            if not missing:
                break
            if port.tier.caps.remote:
                yield port.lookups
            here = port.present([keys[at] for at in missing], exact=exact)
            for at in [at for at, held in zip(missing, here, strict=True) if held]:
                names[at] = port.name
            missing = [at for at in missing if names[at] is None]
        return names

    def unbroken(self, keys: Sequence[bytes], parts: int, *, exact: bool) -> int:
        """Leading blocks of which every part is somewhere: asks for each, where `match` leaps over a hole.

        Remote tiers are not asked.
        """
        missing = list(range(len(keys)))
        for port in self._ports if keys else ():
            if port.tier.caps.remote:
                continue
            here = port.present([keys[at] for at in missing], exact=exact)
            missing = [at for at, found in zip(missing, here, strict=True) if not found]
            if not missing:
                return len(keys) // parts
        return missing[0] // parts if missing else 0

    @staticmethod
    def _run(port: Port, keys: Sequence[bytes], parts: int, *, exact: bool, depth: int) -> int:
        ends = run_ends(len(keys) // parts, depth, port.tier.caps.run)

        def held(runs: Sequence[int]) -> list[bool]:
            probed = [keys[ends[at] * parts + part] for at in runs for part in range(parts)]
            here = port.present(probed, exact=exact)
            return [all(here[at : at + parts]) for at in range(0, len(here), parts)]

        remote = port.tier.caps.remote
        # Few in one round trip: `acquire` need not ask for them again.
        few = min(_FEW_BLOCKS, _FEW_KEYS // parts) if remote else 0
        found = leading_run(len(ends), held, wide=remote, few=few)
        return ends[found - 1] + 1 if found else 0

    @staticmethod
    def _spread(ports: Sequence[Port], keys: Sequence[bytes], *, exact: bool, depth: int) -> str | None:
        """The slowest tier that is needed for one block whose parts lie in several; None: a part is nowhere."""
        missing, slowest = list(keys), None
        for port in ports:
            if not run_ends(1, depth, port.tier.caps.run):
                continue
            here = port.present(missing, exact=exact)
            if any(here):
                slowest = port.name
            missing = [key for key, found in zip(missing, here, strict=True) if not found]
            if not missing:
                return slowest
        return None

    # ---- leasing

    def new(self, owner: Owner, parts: int, *, exact: bool, checked: bool = True) -> Lease:
        """An empty lease of an owner."""
        lease = Lease(owner, parts, exact=exact, checked=checked, order=self._order)
        with self._lock:
            self._held.setdefault(owner, set()).add(lease)
        return lease

    def steps(
        self, lease: Lease, keys: Sequence[bytes], deadline: float | None, depth: int = 0, *, trial: bool = True
    ) -> Steps[Lease]:
        """Lease the leading run of `keys`, each part in the fastest tier that has it.

        `depth` is the first block's, `trial` as in `Port.usable`.
        """
        usable: dict[Port, bool] = {}
        idle = 0
        while idle < len(self._ports):
            for port in self._ports:
                if len(lease.blocks) == len(keys) or idle == len(self._ports):
                    return self.complete(lease)
                # Not before it is its turn: what faster tiers have takes no trial.
                if port not in usable:
                    usable[port] = port.usable(trial=trial)
                if not usable[port]:
                    idle += 1
                    continue
                if lease.checked or port is not self._ports[0]:
                    yield port.lookups
                # Else nobody looks at bytes, and host's index answers sooner than another thread would wake.
                handles = self._acquire(port, lease, keys, deadline, depth)
                if not lease.extend(port.tier, handles):
                    port.release(handles)
                    return lease
                idle = 1 if handles else idle + 1
        return self.complete(lease)

    @staticmethod
    def _acquire(
        port: Port, lease: Lease, keys: Sequence[bytes], deadline: float | None, depth: int
    ) -> Sequence[Handle]:
        """Lease what a tier has of those `keys` that come after what is leased already."""
        first, run = len(lease.blocks), port.tier.caps.run
        if run == 1:
            return port.acquire(keys[first:], lease.owner, deadline, exact=lease.exact, checked=lease.checked)
        found = [
            port.acquire(chain, lease.owner, deadline, exact=lease.exact) if chain else ()
            for chain in columns(keys, first, lease.parts, depth, run)
        ]
        leading, rest = interleaved(found)
        port.release(rest)
        return leading

    def complete(self, lease: Lease) -> Lease:
        """Let the lease grow no more, and give back an incomplete last block, in the threads of its tiers."""
        rest = lease.close()
        for port in self._ports if rest else ():
            handles = [handle for tier, handle in rest if tier is port.tier]
            if not port.lookups.submit(partial(port.release, handles)):
                port.release(handles)
        if not lease.blocks:
            self._forget(lease)
        return lease

    def release(self, lease: Lease) -> None:
        """End a lease. Idempotent."""
        self._forget(lease)
        self._give_back(lease.end())

    def _forget(self, lease: Lease) -> None:
        with self._lock:
            held = self._held.get(lease.owner)
            if held is not None:
                held.discard(lease)
                if not held:
                    del self._held[lease.owner]

    def release_owner(self, owner: Owner) -> None:
        """End every lease of an owner; one that is still being acquired ends up empty."""
        with self._lock:
            leases = self._held.pop(owner, set())
        for lease in leases:
            self._give_back(lease.end())

    def delete(self, is_gone: Callable[[BlockRef], bool]) -> None:
        """Blocks were deleted from the tiers in which they lie: no lease brings them back into host."""
        with self._lock:
            leases = [lease for held in self._held.values() for lease in held]
        for lease in leases:
            lease.delete(is_gone)

    def _give_back(self, blocks: Sequence[tuple[Tier, Handle]]) -> None:
        for port in self._ports if blocks else ():
            port.release([handle for tier, handle in blocks if tier is port.tier])

    @property
    def count(self) -> int:
        """Leases that were not ended."""
        with self._lock:
            return sum(map(len, self._held.values()))


class Pins:
    """Blocks that owners keep in host. A pin gives out no bytes, so that it may expire. Thread-safe.

    Args:
        gate: host's port.
        metrics, clock: the store's.
    """

    def __init__(self, gate: Port, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._gate = gate
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._pins: dict[Owner, list[tuple[float | None, list[Handle]]]] = {}

    def add(self, keys: Sequence[bytes], owner: Owner, parts: int, ttl: float | None) -> int:
        """Pin the leading run in host; returns its blocks. Raises `RequestError` for a `ttl` that is none."""
        if ttl is not None and not ttl >= 0:
            raise RequestError(f"ttl {ttl}: expected seconds, at least 0, or None to pin until `unpin`")
        self.expire()
        handles = list(self._gate.acquire(keys, owner))
        whole = len(handles) // parts * parts
        self._gate.release(handles[whole:])
        if whole:
            until = None if ttl is None else self._clock() + ttl
            with self._lock:
                self._pins.setdefault(owner, []).append((until, handles[:whole]))
        return whole // parts

    def of(self, owner: Owner) -> object:
        """What an owner has pinned; None: nothing."""
        return self._pins.get(owner)

    def remove(self, owner: Owner) -> None:
        """End all pins of an owner."""
        with self._lock:
            ended = self._pins.pop(owner, [])
        self._release(ended)

    def expire(self) -> None:
        """End the pins whose time is over."""
        now = self._clock()
        ended: list[tuple[float | None, list[Handle]]] = []
        with self._lock:
            for owner, pins in list(self._pins.items()):
                over = [pin for pin in pins if pin[0] is not None and pin[0] <= now]
                if over:
                    ended += over
                    self._pins[owner] = [pin for pin in pins if pin not in over]
                    if not self._pins[owner]:
                        del self._pins[owner]
        self._release(ended)
        if ended:
            self._metrics.expired_pins.inc(len(ended))

    def _release(self, pins: Iterable[tuple[float | None, list[Handle]]]) -> None:
        for _, handles in pins:
            self._gate.release(handles)

    @property
    def count(self) -> int:
        """Records pinned, each as often as it is."""
        with self._lock:
            return sum(len(handles) for pins in self._pins.values() for _, handles in pins)
