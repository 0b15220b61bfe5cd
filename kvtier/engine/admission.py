"""Admission: which waiting requests get device blocks, and whether what they need is found, loaded or computed."""

import enum
from math import ceil

from kvtier.engine.books import Books, Loading
from kvtier.engine.plan import Draft
from kvtier.engine.request import Request, State
from kvtier.engine.room import Room
from kvtier.gpu.table import BlockTable
from kvtier.hooks import Match, Pending

__all__ = ["Admission"]

# Requests whose look-up is under way do not hold up those behind them, but only this many are asked about in a step.
_MAX_LOOKS = 16
# One that does not fit lets so many others pass, then nobody.
_MAX_OVERTAKEN = 4


class _Outcome(enum.Enum):
    ADMITTED = enum.auto()
    SKIPPED = enum.auto()
    BLOCKED = enum.auto()


class Admission:
    """Considers waiting requests, in their order, within one step at a time.

    Args:
        books: the scheduler's.
        room: makes room for requests of better classes.
        token_budget: of a step.
    """

    def __init__(self, books: Books, room: Room, token_budget: int) -> None:
        self._books = books
        self._room = room
        self._token_budget = token_budget
        self._looks = 0
        self._blocked: list[Request] = []
        self._postponed: list[Request] = []  # those of them that want nothing but a place in the next step
        self._stuck = False
        self._stalled: dict[str, int] = {}  # who did not fit into how many spare blocks

    def begin(self) -> None:
        """A step is planned."""
        self._looks = 0
        self._blocked, self._postponed = [], []
        self._stuck = self._room.stuck

    def is_closed(self, draft: Draft) -> bool:
        """Whether nobody else gets blocks in this step."""
        if self._is_crowded(draft) and not (self._stuck or self._books.order.classes):
            return True
        return self._looks >= _MAX_LOOKS or any(request.overtaken >= _MAX_OVERTAKEN for request in self._blocked)

    def _is_crowded(self, draft: Draft) -> bool:
        return draft.withdrawn or self._books.num_active >= self._books.max_running

    def consider(self, request: Request, draft: Draft) -> None:
        """Admit a waiting request if it fits."""
        if request.state is State.SWAPPING_OUT or request.settled:
            return
        if request.bereft == self._books.step:
            # A step under way may still compute it: what that brings would be taken for what it has then.
            return
        if self._books.order.classes and any(self._room.is_worse(request, other) for other in self._postponed):
            # It would have to give its blocks back at once.
            return
        self._looks += 1
        outcome = self._admit(request, draft)
        if outcome is _Outcome.BLOCKED:
            self._blocked.append(request)
        elif outcome is _Outcome.ADMITTED:
            self._stuck = False
            for other in self._blocked:
                other.overtaken += 1

    def forget(self, request: Request) -> None:
        """The request waits no more."""
        self._stalled.pop(request.id, None)

    def _admit(self, request: Request, draft: Draft) -> _Outcome:
        books = self._books
        crowded, givers = self._is_crowded(draft), self._room.givers(request, stuck=self._stuck)
        if crowded and not givers:
            return _Outcome.BLOCKED
        spare = books.pool.unused - self._headroom(request)
        if not givers and spare <= self._stalled.get(request.id, spare - 1):
            return _Outcome.BLOCKED
        table = books.pool.table(self._found(request))
        if self._is_on_its_way(request, len(table.ids)):
            table.release()
            return _Outcome.SKIPPED
        offer = self._offered(request, table.capacity_tokens)
        if offer is None:
            table.release()
            return _Outcome.SKIPPED
        if offer.tokens == 0 and draft.budget == 0:
            # Nobody gives way for it as long as it could not be computed.
            self._postponed.append(request)
            table.release()
            return _Outcome.BLOCKED
        wanted = books.pool.wanted(table, request.num_tokens, self._token_budget)
        fits = not crowded and books.pool.fits(wanted, self._headroom(request))
        if not fits:
            fits = self._room.displace(givers, wanted, draft)
            if not fits:
                self._stalled[request.id] = spare
        if not fits:
            table.release()
            return _Outcome.BLOCKED
        self._take(request, table, offer, draft)
        return _Outcome.ADMITTED

    def _headroom(self, request: Request) -> int:
        """Blocks that stay free for those that are active already, or this one would be preempted right away."""
        books = self._books
        if not books.num_moving:
            return 0
        steps = books.rules.residency if request.metrics.preemptions else 1
        each = max(1, ceil(steps / books.pool.block_size))
        return max(books.num_moving * each, ceil(books.rules.watermark * books.pool.num_blocks))

    def _found(self, request: Request) -> list[int]:
        """Blocks that the device has, each with one more reference."""
        swapped = request.state is State.SWAPPED
        if swapped and not request.exact:
            # It goes on with its own KV, not with that of another that is as little exact.
            return []
        keys = request.chain[: request.reusable_blocks]
        return self._books.pool.match(keys, exact=swapped or not request.lossy)

    def _offered(self, request: Request, device_tokens: int) -> Match | None:
        """What lies beyond the device's own and can be loaded; None if that is not known yet.

        Whole blocks, but for what was kept of a request that was swapped out.
        """
        hook, size = self._books.hook, self._books.pool.block_size
        again = self._books.rules.preemption == "recompute" and request.metrics.preemptions
        if hook is None or again:
            return Match(0)
        offer = hook.match(request, device_tokens)
        if isinstance(offer, Pending):
            return None
        swapped = request.state is State.SWAPPED
        most = (request.num_tokens - 1 if swapped else request.reusable_blocks * size) - device_tokens
        whole = swapped and offer.tokens <= most
        request.offered = offer.tokens if whole else max(0, min(offer.tokens, most)) // size * size
        return offer._replace(tokens=request.offered)

    def _is_on_its_way(self, request: Request, device_blocks: int) -> bool:
        """Whether an active request will soon publish the next block that this one could take from the device."""
        if device_blocks >= request.reusable_blocks or request.state is State.SWAPPED:
            return False
        wanted = request.chain[device_blocks]
        active = (*self._books.running, *(loading.request for loading in self._books.loading.values()))
        return any(
            other.published <= device_blocks < len(other.chain)
            and other.chain[device_blocks] == wanted
            # Only blocks that are sure to be exact are worth waiting for, unless others do as well.
            and (request.lossy or (other.exact and not other.lossy))
            for other in active
        )

    def _take(self, request: Request, table: BlockTable, offer: Match, draft: Draft) -> None:
        books, device_tokens, external = self._books, table.capacity_tokens, offer.tokens
        books.waiting.remove(request)
        self.forget(request)
        request.overtaken = request.offered = 0
        request.resumed = books.step
        request.metrics.cached_tokens += device_tokens
        books.counters.device_hits += device_tokens
        exact, stop = all(map(books.pool.is_exact, table.held)), device_tokens + external
        if external:
            table.leave_behind(stop + 1)
            table.extend(stop, max(device_tokens, table.gone * books.pool.block_size))
            first = max(device_tokens // books.pool.block_size, table.gone)
            draft.receive(table.ids[first:], table.windowed_ids[first:])
        if external and not self._hides(request, stop, offer.seconds, draft):
            request.start_loading(table, device_tokens, exact=exact)
            books.loading[request.id] = Loading(request, stop, books.clock())
        else:
            if external:
                request.start_overlapped(table, device_tokens, stop, exact=exact and offer.exact)
                draft.overlap(request, stop)
            else:
                request.start_running(table, device_tokens, exact=exact)
            books.run(request)
            reachable = table.capacity_tokens + books.pool.free_blocks * books.pool.block_size
            goal = min(request.num_tokens, stop + draft.budget, reachable)
            draft.compute(request, goal, table.extend(goal, stop))
        if books.hook is not None:
            books.hook.allocated(request, table.ids, external, table.windowed_ids)

    def _hides(self, request: Request, stop: int, seconds: float | None, draft: Draft) -> bool:
        """Whether a load up to `stop` takes no longer than the step that would compute what follows."""
        # Sparse attention looks at the blocks before the first layer.
        if seconds is None or not draft.budget or not self._books.rules.overlap_loads or request.params.sparse:
            return False
        work = draft.work
        new = min(request.num_tokens - stop, draft.budget)
        step = self._books.steps.seconds(work._replace(prefill=work.prefill + new))
        return step is not None and seconds <= step
