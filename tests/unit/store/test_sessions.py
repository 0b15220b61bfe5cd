"""Which blocks belong to one session alone, and when its turn has ended."""

from hypothesis import given
from hypothesis import strategies as st

from kvtier.hints import NO_HINT, Hint
from kvtier.policies import NextTurn, NoPrefetch
from kvtier.store.sessions import SessionBook, Turns


def of(session: str | None) -> Hint:
    return NO_HINT if session is None else Hint(session=session)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(0, 5)), max_size=60))
def test_a_key_is_a_sessions_own_if_nobody_else_named_it(notes: list[tuple[str | None, int]]) -> None:
    book = SessionBook()
    users: dict[bytes, list[str | None]] = {}
    for session, number in notes:
        key = bytes([number])
        book.note([key], [of(session)])
        # Who comes without a session before any session did is not remembered.
        if session is not None or users.get(key):
            users.setdefault(key, []).append(session)
    for session in ("a", "b", "c"):
        own = {key for key, who in users.items() if set(who) == {session}}
        assert set(book.keys(session)) == {key for key, who in users.items() if session in who}
        assert set(book.end(session)) == own
        assert book.keys(session) == []
        assert book.end(session) == []
    assert len(book) == 0


def test_what_was_shared_stays_shared_when_one_of_them_ends() -> None:
    book = SessionBook()
    book.note([b"k"], [of("a")])
    book.note([b"k"], [of("b")])
    assert book.end("a") == []
    assert book.end("b") == []
    book.note([b"k"], [of("c")])
    assert book.end("c") == []


def test_it_is_bounded_and_forgets_who_was_quiet_longest() -> None:
    book = SessionBook(limit=10)
    for number in range(100):
        book.note([bytes([number, at]) for at in range(3)], [of(str(number))] * 3)
    assert len(book) == 3
    assert book.keys("99") != []
    assert book.keys("0") == []
    assert len(book._owner) == 9


def test_a_turn_ends_once_its_session_is_quiet_and_the_next_one_is_foreseen() -> None:
    now = [0.0]
    book = SessionBook()
    turns = Turns(NextTurn(lead_seconds=2.0), book, lambda: now[0])
    due = []
    for second in range(60):
        now[0] = float(second)
        # Three turns, 20 seconds apart, each of several puts.
        if second in (0, 1, 20, 21, 40, 41):
            turns.note(book.note([bytes([second])], [of("a")]))
        due += [(second, session, len(keys)) for session, keys in turns.due()]
    # Known from the second turn on: 20 s after its end, less the lead.
    assert due == [(39, "a", 4), (59, "a", 6)]
    turns.end("a")
    now[0] = 1000.0
    assert turns.due() == []


def test_without_a_policy_nothing_is_kept() -> None:
    turns = Turns(NoPrefetch(), SessionBook(), lambda: 0.0)
    turns.note({"a"})
    assert turns._active == {}
