"""Regions across processes: read-only means read-only, staging means staging."""

import json
import mmap
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtier.attach import HUGE
from kvtier.cpu import AttachedRegion, HostTier, StagingRegion, recv_regions, send_regions
from kvtier.errors import CapacityError, LeaseError, TierUnavailable
from kvtier.layout import Span
from kvtier.testing.blocks import chain_refs, content, load, put
from kvtier.tiers import Handle, Status

SIZE = 6000
CHILD = Path(__file__).with_name("attach_process.py")


def test_another_process_reads_in_place_and_fills_staging() -> None:
    tier, staging = HostTier(1 << 20), StagingRegion(SIZE, 2)
    refs = chain_refs(2)
    put(tier, refs[:1], SIZE)
    leased = tier.acquire([refs[0].key], "child").wait().handles
    slot = staging.allocate(1)[0]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen([sys.executable, str(CHILD), str(theirs.fileno())], pass_fds=[theirs.fileno()])
        theirs.close()
        host = tier.regions()[0]
        send_regions(ours, [host, *staging.regions()])
        plan = {"source": tier.span(leased[0]), "target": slot, "owner": os.getpid(), "fd": host.fd}
        with ours.makefile("rw") as stream:
            stream.write(json.dumps(plan) + "\n")
            stream.flush()
            answer = json.loads(stream.readline())
        assert child.wait(30) == 0
    expected = content(refs[0], SIZE)
    assert bytes.fromhex(answer["block"]) == expected
    assert "read-only" in answer["write"]
    assert answer["remap"] == "PermissionError"
    assert not answer["torch"]
    tier.release(leased)

    filled = staging.view(slot)
    assert bytes(filled) == bytes(expected)[::-1]
    handles = [h for h in tier.reserve(refs[1:], [SIZE], ["raw"], "owner") if isinstance(h, Handle)]
    tier.write([(handles[0], filled)])
    tier.commit(handles)
    staging.free([slot])
    assert load(tier, [ref.key for ref in refs])[1] == (Status.OK, bytes(expected)[::-1])


def test_host_region_refuses_every_further_way_of_writing() -> None:
    tier = HostTier(1 << 20)
    share = tier.regions()[0]
    with pytest.raises(TierUnavailable, match="writable=True"):
        AttachedRegion(share.fd, share.nbytes, writable=True)
    with pytest.raises(PermissionError):
        os.write(share.fd, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(share.fd, 4096)
    attached = AttachedRegion(share.fd, share.nbytes, writable=False)
    raw = np.frombuffer(attached.view(Span(share.region, 0, 4096)), np.uint8)
    assert not raw.flags.writeable
    refs = chain_refs(1)
    put(tier, refs, SIZE)
    assert load(tier, [refs[0].key])[0][0] is Status.OK, "the owner itself can still write"


def test_in_the_owners_process_its_own_mapping_serves() -> None:
    tier, staging = HostTier(1 << 20), StagingRegion(SIZE, 2)
    mappings = shared_mappings()
    for share in (*tier.regions(), *staging.regions()):
        assert share.memory is not None
        view = AttachedRegion(share.fd, share.nbytes, share.writable, share.memory).view(Span(share.region, 4096, 64))
        assert np.frombuffer(view, np.uint8).ctypes.data == np.frombuffer(share.memory, np.uint8).ctypes.data + 4096
        assert view.readonly == (not share.writable)
    assert shared_mappings() == mappings


def shared_mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:kvtier" in line]


def test_staging_cannot_shrink_under_its_reader() -> None:
    staging = StagingRegion(SIZE, 2)
    with pytest.raises(PermissionError):
        os.ftruncate(staging.regions()[0].fd, 0)


def test_attached_views_are_bounded_and_outlive_the_descriptor() -> None:
    staging = StagingRegion(4096, 4)
    share = staging.regions()[0]
    attached = AttachedRegion(os.dup(share.fd), share.nbytes, writable=True)
    spans = staging.allocate(4)
    view = attached.view(spans[3])
    view[:] = b"\x07" * 4096
    assert staging.view(spans[3]) == view
    staging.close()
    staging.close()
    assert bytes(view) == b"\x07" * 4096
    for span in (Span(0, -1, 4), Span(0, 4 * 4096 - 3, 4), Span(0, 0, 0)):
        with pytest.raises(TierUnavailable, match="outside"):
            attached.view(span)
    with pytest.raises(TierUnavailable, match="in a file of"):
        AttachedRegion(HostTier(4096).regions()[0].fd, mmap.PAGESIZE * 2, writable=False)


@pytest.mark.parametrize("message", [b"", b"\x01", b"\x01\x00\x00\x00", b"\xff\xff\xff\xff" + bytes(99)])
def test_a_peer_that_talks_nonsense_is_refused(message: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(message)
        theirs.close()
        with pytest.raises(TierUnavailable, match="peer"):
            recv_regions(ours)


def test_a_region_is_mapped_from_the_boundary_of_a_huge_page_wherever_there_is_room() -> None:
    holes = [mmap.mmap(-1, count * mmap.PAGESIZE) for count in (*range(1, 600, 7), 600)]
    del holes[::2]  # the kernel fills holes first: a mapping comes to lie where nobody could foretell
    for nbytes in (4096, HUGE - 4096, HUGE, HUGE + 4096):
        staging = StagingRegion(nbytes, 1)
        share = staging.regions()[0]
        attached = AttachedRegion(share.fd, share.nbytes, writable=True)
        (span,) = staging.allocate(1)
        for view in (attached.view(span), staging.view(span)):
            assert np.frombuffer(view, np.uint8).ctypes.data % HUGE == 0
        attached.view(span)[:] = b"\x05" * nbytes
        staging.close()
        assert bytes(attached.view(span)) == b"\x05" * nbytes


def test_staging_slots_are_given_once_and_freed_once() -> None:
    staging = StagingRegion(100, 3)
    spans = staging.allocate(5)
    assert len({span.offset for span in spans}) == len(spans) == 3
    assert all(span.offset % 4096 == 0 and span.nbytes == 100 for span in spans)
    assert staging.allocate(1) == []
    with pytest.raises(LeaseError, match="no allocated staging slot"):
        staging.free([spans[0], spans[0]])
    staging.free(spans[:2])
    assert staging.free_slots == 2
    for verb in (lambda: staging.free(spans[1:]), lambda: staging.view(spans[0]), lambda: staging.free([spans[1]])):
        with pytest.raises(LeaseError):
            verb()
    assert staging.free_slots == 2
    staging.free(spans[2:])
    for slot_bytes, slots in ((0, 1), (4096, 0)):
        with pytest.raises(CapacityError):
            StagingRegion(slot_bytes, slots)
