"""A damaged record, met by a look-up that has little time."""

import contextlib
import time
from pathlib import Path

import pytest

pytest.importorskip("obstore")

from objects_world import flip

from kvtier.config.remote import RemoteSettings
from kvtier.remote import open_remote
from kvtier.testing.blocks import chain_refs, put
from kvtier.tiers import Status


def test_its_removal_keeps_to_the_deadline_of_who_found_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ref,) = chain_refs(1)
    settings = RemoteSettings(url=tmp_path.as_uri(), options="run=1", absent_ttl=0, timeout=60)
    # Who wrote it takes it to be as it was for a while.
    with contextlib.closing(open_remote(settings)) as other:
        put(other, [ref], 4096)
        flip(other, ref.key + b"e", at=20)
    with contextlib.closing(open_remote(settings)) as tier:
        limits: list[float] = []
        remove = tier._backend.remove

        def noted(names: list[bytes], deadline: float) -> list[bool]:
            limits.append(deadline)
            return remove(names, deadline)

        monkeypatch.setattr(tier._backend, "remove", noted)
        until = time.monotonic() + 20
        assert tier.acquire([ref.key], "reader", until).wait(30).statuses == (Status.CORRUPT,)
        assert limits == [until]
        assert tier.contains([ref.key]).wait(30).statuses == (Status.MISS,)
