"""An engine that stops itself (SIGSTOP) where it is told to, in a process of its own. Prints its URL.

`Authorization: stop PORT MOMENT` is for the engine on that port:

    tokenize    before it answers /tokenize
    body        before it reads a request's body
    answer      before an answer begins
    piece       after the first piece of a stream
    refusal     after half of a 503

It can be continued, and goes on from there.
"""

import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Engine(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._tell(200, {"object": "list", "data": [{"id": f"only-{self._port}"}]})

    def do_POST(self) -> None:
        if self.path != "/tokenize":
            self._stop_at("body")
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            self._stop_at("tokenize")
            self._tell(200, {"tokens": list(body["prompt"].encode())})
            return
        self._stop_at("answer")
        if self._is_told("refusal"):
            self._tell(503, {"error": "full"}, between=lambda: self._stop_at("refusal"))
        else:
            self._tell(200, {"from": self._port}, between=lambda: self._stop_at("piece"))

    def _tell(self, status: int, answer: dict[str, Any], between: Any = lambda: None) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:1])
        between()
        self.wfile.write(data[1:])

    @property
    def _port(self) -> int:
        return int(self.server.server_address[1])

    def _is_told(self, moment: str) -> bool:
        return self.headers.get("authorization") == f"stop {self._port} {moment}"

    def _stop_at(self, moment: str) -> None:
        if self._is_told(moment):
            # To this thread, which else would go on for a moment.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
