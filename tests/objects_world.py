"""Object stores for tests: a real S3 server in a process of its own, and hands on what lies in a store."""

import os
import signal
import subprocess
import sys
import urllib.request

import obstore
from obstore.store import S3Store

from kvtier.config.remote import RemoteSettings
from kvtier.remote import RemoteTier

BUCKET = "blocks"

_KEYS = {"region": "us-east-1", "access_key_id": "test", "secret_access_key": "test"}

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


class S3Server:
    """moto's S3 server, with one empty bucket. It forgets everything when it is killed."""

    def __init__(self) -> None:
        self.port = 0
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        """Start it, at its old port if it had one."""
        command = [sys.executable, "-c", _SERVE, str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the S3 server did not come up"
        self.port = int(line)
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT"), timeout=10).close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def settings(self, folder: str, run: int, **more: object) -> RemoteSettings:
        """Of a tier whose objects lie under a folder of the bucket."""
        keys = ",".join(f"{name}={value}" for name, value in _KEYS.items())
        options = f"run={run},endpoint={self.endpoint},allow_http=true,{keys}"
        return RemoteSettings(url=f"s3://{BUCKET}/{folder}", options=options, **more)

    def empty(self) -> None:
        """Remove all objects."""
        store = self.store()
        for batch in obstore.list(store):
            obstore.delete(store, [meta["path"] for meta in batch])

    def store(self) -> S3Store:
        """The bucket itself."""
        return S3Store(BUCKET, endpoint=self.endpoint, client_options={"allow_http": True}, **_KEYS)

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        assert self._process is not None
        self.signal(signal.SIGKILL)
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


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
