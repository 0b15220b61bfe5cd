"""What was not there is remembered for a while, and never longer than it is true as far as this process knows."""

from kvtier.remote.negative import Absent


def absent(ttl: float = 1.0, limit: int = 8) -> tuple[Absent, list[float]]:
    now = [0.0]
    return Absent(ttl, limit, lambda: now[0]), now


def test_is_remembered_until_its_time_is_over() -> None:
    names, now = absent()
    names.add([b"a"], names.stamp)
    assert b"a" in names
    assert b"b" not in names
    now[0] = 0.99
    assert b"a" in names
    now[0] = 1.0
    assert b"a" not in names


def test_an_own_write_is_found_at_once() -> None:
    names, _ = absent()
    names.add([b"a", b"b"], names.stamp)
    names.discard([b"a"])
    assert b"a" not in names
    assert b"b" in names


def test_an_answer_that_is_older_than_a_write_is_void() -> None:
    names, _ = absent()
    stamp = names.stamp
    names.discard([b"a"])
    names.add([b"a"], stamp)
    assert b"a" not in names


def test_the_oldest_go_first() -> None:
    names, _ = absent(limit=2)
    for name in (b"a", b"b", b"c"):
        names.add([name], names.stamp)
    assert [name in names for name in (b"a", b"b", b"c")] == [False, True, True]


def test_without_a_time_nothing_is_remembered() -> None:
    names, _ = absent(ttl=0)
    names.add([b"a"], names.stamp)
    assert b"a" not in names
