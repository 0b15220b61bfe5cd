"""Slow readers while blocks come and go: what they hold stays, and their bytes are right."""

import socket
import threading
import time
from contextlib import contextmanager

import pytest
from patience import came_true, until
from rest_world import KEYS, block, digest, error_of, read_all, running


@pytest.fixture(scope="module")
def rest():
    """Its host tier has room for four blocks of 250 kB; the kernel buffers next to nothing."""
    with running(host="1MiB", send_buffer=4096, idle_timeout=60.0) as served:
        served.http.post("/v1/namespaces", json={"name": "n"})
        yield served


def put(http, at, nbytes):
    return http.put(f"/v1/namespaces/n/blocks/{KEYS[at]}", content=block(at, nbytes)).status_code


@contextmanager
def asked(rest, at):
    """A client that has asked for a block and takes nothing of it."""
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        line.settimeout(20)
        line.connect(("127.0.0.1", rest.port))
        path = f"/v1/namespaces/n/blocks/{KEYS[at]}"
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        yield line


def taken(line):
    head, _, body = read_all(line).partition(b"\r\n\r\n")
    headers = dict(row.split(": ", 1) for row in head.decode().split("\r\n")[1:])
    return int(head.split()[1]), headers, body


def test_what_is_being_sent_stays_where_it_is(rest):
    rest.http.post("/v1/namespaces/n:clear")
    assert put(rest.http, 0, 250_000) == 201
    with asked(rest, 0) as line:
        until(lambda: rest.leases() > 0)
        for at in range(1, 12):
            put(rest.http, at, 250_000)
        assert rest.leases() > 0
        status, headers, body = taken(line)
        assert (status, headers["kvtier-digest"]) == (200, digest(body))
        assert body == block(0, 250_000)
    rest.at_rest()


def test_who_leaves_in_the_middle_of_an_answer_holds_nothing(rest):
    rest.http.post("/v1/namespaces/n:clear")
    assert put(rest.http, 0, 250_000) == 201
    began = time.monotonic()
    with asked(rest, 0) as line:
        assert line.recv(100).startswith(b"HTTP/1.1 200")
        assert rest.leases() > 0
    rest.at_rest()
    assert time.monotonic() - began < rest.cache.settings.idle_timeout / 2


def test_what_a_connection_buffers_is_its_own(rest):
    rest.http.post("/v1/namespaces/n:clear")
    assert put(rest.http, 0, 60_000) == 201
    with asked(rest, 0) as line:
        # All of it was given to the connection, little of it is out: the block may leave, its bytes are copied.
        until(lambda: rest.server.server_state.total_requests and not rest.server.server_state.tasks)
        rest.at_rest()
        for at in range(1, 25):
            put(rest.http, at, 60_000)
        _, headers, body = taken(line)
        assert body == block(0, 60_000)
        assert headers["kvtier-digest"] == digest(body)


def test_who_holds_too_much_is_told_to_come_back():
    with running(send_buffer=4096, max_block="128KiB", max_batch="128KiB", inflight_bytes="256KiB") as rest:
        rest.http.post("/v1/namespaces", json={"name": "n"})
        for at in range(3):
            assert put(rest.http, at, 120_000) == 201
        with asked(rest, 0), asked(rest, 1):
            until(lambda: rest.tenants()[0].inflight_bytes == 240_000)
            busy = rest.http.get(f"/v1/namespaces/n/blocks/{KEYS[2]}")
            assert (busy.status_code, error_of(busy)["code"]) == (503, "busy")
            assert int(busy.headers["Retry-After"]) >= 1
        until(lambda: rest.http.get(f"/v1/namespaces/n/blocks/{KEYS[2]}").status_code == 200)
        rest.at_rest()


def test_readers_and_writers_at_once(rest):
    keys, wrong, whole, stop = KEYS[:6], [], [], threading.Event()

    def write():
        with rest.client() as http:
            while not stop.is_set():
                for at in range(len(keys)):
                    put(http, at, 250_000)

    def read(shift):
        at = shift
        while not stop.is_set():
            at = (at + 1) % len(keys)
            with asked(rest, at) as line:
                status, headers, body = taken(line)
            if status == 200:
                whole.append(at)
                if body != block(at, 250_000) or headers["kvtier-digest"] != digest(body):
                    wrong.append(at)

    writer = threading.Thread(target=write)
    readers = [threading.Thread(target=read, args=(shift,)) for shift in range(3)]
    for thread in (writer, *readers):
        thread.start()
    # Who reads what was not written yet is quick.
    enough = came_true(lambda: len(whole) >= 20)
    stop.set()
    for thread in (writer, *readers):
        thread.join()
    assert enough
    assert wrong == []
    rest.at_rest()
