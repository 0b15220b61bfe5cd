"""Room: who gives way where device blocks or places are missing, and how."""

from collections.abc import Sequence

from kvtier.engine.books import Books
from kvtier.engine.plan import Draft
from kvtier.engine.request import Request
from kvtier.engine.victims import VictimKey
from kvtier.gpu.pool import Amount

__all__ = ["Room"]


class Room:
    """Preempts running requests for others that are ahead of them.

    Only those behind in the order give way, so that whoever is ahead of all makes progress; which one of them is the
    victims' rule to say.

    Sequences of one request and beams give way one by one, too. What they share stays in the device as long as one of
    them runs, so that the others come back by a prefix hit and bring back their tails alone; and a group as a unit
    could only come back once there is room for all of it. A search that misses a beam pauses (`BeamGroup`).

    Args:
        books: the scheduler's.
        victim: the largest key gives way first.
    """

    def __init__(self, books: Books, victim: VictimKey) -> None:
        self._books = books
        self._victim = victim

    def make(self, request: Request, stop: int, draft: Draft) -> bool:
        """Preempt until a running request can grow to `stop`; False if it cannot in this step."""
        books = self._books
        while request.blocks.missing(stop, request.reach) > books.pool.free_blocks:
            behind = [other for other in books.running if other.rank > request.rank]
            if behind:
                self.preempt(max(behind, key=self._key), draft)
                continue
            if not (books.loading or books.held or self._sheds(request)):
                self.preempt(request, draft)
            # Otherwise blocks come back without anyone losing work: it pauses.
            return False
        return True

    def _sheds(self, request: Request) -> bool:
        """Whether blocks fall behind the request's window once a step under way has ended."""
        return self._books.pool.window is not None and request.reach > request.num_computed

    def displace(self, givers: list[Request], wanted: Amount, draft: Draft) -> bool:
        """Preempt `givers` until so much is free and a place; False, and nobody, if they have not enough."""
        books = self._books
        if not givers or not books.pool.fits(wanted, freed=books.pool.freed_by(other.blocks for other in givers)):
            return False
        while givers and not (books.pool.fits(wanted) and books.num_active < books.max_running):
            victim = max(givers, key=self._key)
            givers.remove(victim)
            self.preempt(victim, draft)
        return books.pool.fits(wanted) and books.num_active < books.max_running

    @property
    def stuck(self) -> bool:
        """Whether all that run pause until somebody else has come as far, and no blocks are about to come back."""
        books = self._books
        return bool(books.running) and not (books.num_moving or books.held)

    def givers(self, request: Request, *, stuck: bool) -> list[Request]:
        """Who would give way to a waiting request: those of worse classes, or all, where they wait for such as it."""
        books = self._books
        if stuck:
            return list(books.running)
        return [other for other in books.running if self.is_worse(other, request)] if books.order.classes else []

    @staticmethod
    def is_worse(other: Request, request: Request) -> bool:
        """Whether the other one gives way to a request that waits."""
        # By rank as well: who has waited long is not put back by newcomers of whatever class.
        return other.params.priority > request.params.priority and other.rank > request.rank

    def _key(self, request: Request) -> tuple[bool, float, float]:
        rested = self._books.step - request.resumed >= self._books.rules.residency
        return (rested or not request.metrics.preemptions, *self._victim(request))

    def preempt(self, request: Request, draft: Draft) -> None:
        """A running request loses its blocks: what they hold is kept elsewhere, or it starts over."""
        books = self._books
        ids, windowed_ids = draft.withdraw(request)
        books.running.remove(request)
        request.bereft = books.step
        request.metrics.preemptions += 1
        books.counters.preemptions += 1
        if self._keeps(request, ids, windowed_ids):
            books.counters.swaps += 1
            request.swap_out().release()
        else:
            books.give_back(request.id, request.preempt(), "preempt")
        books.waiting.add(request)

    def _keeps(self, request: Request, block_ids: Sequence[int], windowed_ids: Sequence[int]) -> bool:
        hook, rule = self._books.hook, self._books.rules.preemption
        # Who wants scores of the prompt must see all of it in one life.
        if hook is None or rule == "recompute" or request.reach == 0 or request.to_be_scored:
            return False
        if request.loading_from is not None:  # what it holds is not there yet
            return False
        blocks = -(-request.reach // self._books.pool.block_size)
        return hook.swap_out(
            request,
            block_ids[:blocks],
            request.reach,
            exact=request.exact,
            forced=rule == "swap",
            windowed_ids=windowed_ids[:blocks],
        )
