"""Places are shared so that whoever has none gets one."""

import contextlib

import pytest

from kvtier.service.cache import Places, ServiceError


def fill(places: Places, tenants: str, stack: contextlib.ExitStack) -> dict[str, int]:
    """What each tenant has when all take, in turn, what they can get."""
    got = dict.fromkeys(tenants, 0)
    hungry = set(tenants)
    while hungry:
        for tenant in sorted(hungry):
            try:
                stack.enter_context(places.taken(tenant))
            except ServiceError:
                hungry.discard(tenant)
            else:
                got[tenant] += 1
    return got


@pytest.mark.parametrize("tenants", ["a", "ab", "abcde", "abcdefghijkl"])
def test_greedy_tenants_have_equal_parts_and_leave_some(tenants: str) -> None:
    places = Places(512)
    with contextlib.ExitStack() as stack:
        got = fill(places, tenants, stack)
        share = 3 * 512 / (3 * len(tenants) + 1)
        assert all(share - 2 < taken < share + 2 for taken in got.values())
        left = 512 - sum(got.values())
        assert left >= 512 // (3 * len(tenants) + 1)
        # Whoever has none gets one, down to the last.
        for newcomer in range(left):
            stack.enter_context(places.taken(f"newcomer {newcomer}"))
        with pytest.raises(ServiceError, match="0 are left") as caught:
            stack.enter_context(places.taken("late"))
        assert (caught.value.code, caught.value.retry_after) == ("busy", 1.0)
    with places.taken("late"):
        pass
    assert not places._taken


@pytest.mark.parametrize("most", [1, 2, 3])
def test_few_places_can_be_had(most: int) -> None:
    places = Places(most)
    with contextlib.ExitStack() as stack:
        assert fill(places, "a", stack) == {"a": most}
