"""One job's reports from the workers of all shards, in every order."""

from itertools import permutations

import pytest

from kvtier.connector.parts import Ended, Reports
from kvtier.hooks import TransferResults


def report(shard: int, good: int | None, seconds: float) -> TransferResults:
    if good is None:
        return TransferResults(finished=(7,), seconds={7: seconds}, shard=shard)
    return TransferResults(failed={7: good}, seconds={7: seconds}, shard=shard)


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("goods", [(None, None, None), (2, None, None), (2, 1, None), (0, 1, 2)])
def test_the_last_report_ends_a_job_and_the_least_decides(
    goods: tuple[int | None, ...], order: tuple[int, ...]
) -> None:
    reports = Reports(3)
    *first, last = order
    for shard in first:
        assert list(reports.add(report(shard, goods[shard], shard + 0.5))) == []
        # A shard that repeats itself does not stand in for another.
        assert list(reports.add(report(shard, goods[shard], shard + 0.5))) == []
    known = [good for good in goods if good is not None]
    expected = Ended(7, min(known) if known else None, 2.5)
    assert list(reports.add(report(last, goods[last], last + 0.5))) == [expected]
    assert not reports._open


def test_jobs_of_one_worker_end_at_once() -> None:
    results = TransferResults(finished=(1, 2), failed={3: 4}, seconds={1: 0.5})
    assert list(Reports(1).add(results)) == [Ended(1, None, 0.5), Ended(2, None, 0.0), Ended(3, 4, 0.0)]
