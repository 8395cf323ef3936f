"""A real web server that answers ranges of one object, and can be told to misbehave."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl

#: Answers one GET in place of the server, or returns False to let it answer.
Fault = Callable[["Handler"], bool]


class Web:
    """The server's object, its faults and its log."""

    def __init__(self) -> None:
        self.data = b""
        self.etag = '"1"'
        self.modified = "Sat, 21 Nov 2026 10:00:00 GMT"
        #: The methods and ranges that were asked for, and the bytes that were sent as data.
        self.log: list[str] = []
        self.sent = 0
        #: What happens to the next requests for data; then all goes well.
        self.faults: list[Fault] = []
        #: The status with which questions for the object's facts are refused, and whether the
        #: answer to one has its length.
        self.refusal = 0
        self.tells_length = True
        self.port = 0
        #: The port and the name of another server.
        self.elsewhere, self.elsewhere_host = 0, "localhost"
        #: The path and the headers of the last request for data.
        self.path = ""
        self.headers: dict[str, str] = {}
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """The URL of the object."""
        return f"http://127.0.0.1:{self.port}/folder/object.bin"


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    web: Web
    #: An ETag that this connection alone gives, if there is one.
    etag = ""

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        """Answer with the facts of the object."""
        self.web.log.append("HEAD")
        if self.web.refusal:
            self.answer(self.web.refusal, b"", body=False)
            return
        if not self.web.tells_length:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.send_version()
            self.end_headers()
            return
        self.answer(200, self.web.data, body=False)

    def do_GET(self) -> None:
        """Answer with a range of the object, unless a fault comes first."""
        with self.web.lock:
            self.web.log.append(self.headers.get("Range", "all"))
            self.web.path = self.path
            self.web.headers = {name.lower(): value for name, value in self.headers.items()}
            fault = self.web.faults.pop(0) if self.web.faults else None
        if fault and fault(self):
            return
        condition = self.headers.get("If-Match")
        if condition and condition != self.web.etag:
            self.answer(412, b"")
            return
        if "Range" not in self.headers:
            self.answer(200, self.web.data)
            return
        first, last = self.asked()
        if first >= len(self.web.data):
            self.answer(416, b"")
            return
        data = self.web.data[first : last + 1]
        span = f"bytes {first}-{first + len(data) - 1}/{len(self.web.data)}"
        with self.web.lock:
            self.web.sent += len(data)
        self.answer(206, data, span)

    def asked(self) -> tuple[int, int]:
        """Return the first and the last byte that are asked for."""
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        return first, last

    def answer(self, status: int, data: bytes, span: str = "", *, body: bool = True) -> None:
        """Send one answer."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_version()
        if span:
            self.send_header("Content-Range", span)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def send_version(self) -> None:
        """Send the headers that tell the object's version."""
        for name, value in (
            ("ETag", self.etag or self.web.etag),
            ("Last-Modified", self.web.modified),
        ):
            if value:
                self.send_header(name, value)

    def refuse(self, status: int, text: bytes = b"") -> bool:
        """Answer with a status and a text alone."""
        self.answer(status, text)
        return True

    def cut_off(self) -> bool:
        """Answer with all headers and a part of the body, and close the connection."""
        first, last = self.asked()
        self.send_response(206)
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_version()
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(self.web.data)}")
        self.end_headers()
        self.wfile.write(self.web.data[first : first + (last - first) // 2])
        self.close_connection = True
        return True

    def reset(self) -> bool:
        """Answer with a part of the body, and reset the connection."""
        self.cut_off()
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        return True

    def hang(self) -> bool:
        """Answer nothing until the client gives up."""
        self.connection.recv(1)
        self.close_connection = True
        return True

    def send_more(self) -> bool:
        """Answer with a longer body than was asked for, and say so."""
        first, last = self.asked()
        span = f"bytes {first}-{last}/{len(self.web.data)}"
        self.answer(206, self.web.data[first : last + 1] + b"more", span)
        return True

    def send_more_than_it_says(self) -> bool:
        """Answer with a longer body than the answer's own length."""
        first, last = self.asked()
        span = f"bytes {first}-{last}/{len(self.web.data)}"
        self.answer(206, self.web.data[first : last + 1], span)
        self.wfile.write(b"more")
        return True

    def say_less(self) -> bool:
        """Answer with a part of what was asked for, as if that were all."""
        first, last = self.asked()
        span = f"bytes {first}-{last}/{len(self.web.data)}"
        self.answer(206, self.web.data[first : last - 9], span)
        return True

    def answer_as_another_server(self) -> bool:
        """Answer with the same bytes by another ETag, as another server behind the URL may."""
        if "If-Match" in self.headers:
            return self.refuse(412)
        first, last = self.asked()
        data = self.web.data[first : last + 1]
        self.etag = '"another"'
        self.answer(206, data, f"bytes {first}-{last}/{len(self.web.data)}")
        self.etag = ""
        return True

    def redirect_nowhere(self) -> bool:
        """Redirect, as S3 does for a bucket in another region, without the place."""
        self.answer(301, b"")
        return True

    def give_no_size(self) -> bool:
        """Answer without the object's size, as for one that is made while it is sent."""
        first, last = self.asked()
        self.answer(206, self.web.data[first : last + 1], f"bytes {first}-{last}/*")
        return True

    def redirect_elsewhere(self) -> bool:
        """Send the client to another server, by default: the other name of this machine."""
        self.send_response(307)
        server = f"{self.web.elsewhere_host}:{self.web.elsewhere}"
        self.send_header("Location", f"http://{server}{self.path}")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return True

    def redirect_to_http(self) -> bool:
        """Send the client to a URL without TLS, whose query is secret."""
        self.send_response(302)
        self.send_header("Location", "http://localhost/x?sig=secret")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return True

    def redirect_in_circle(self) -> bool:
        """Send the client to the same place again."""
        self.web.faults.append(Handler.redirect_in_circle)  # before the next request can come
        self.send_response(302)
        self.send_header("Location", self.path)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return True


@contextmanager
def web_server(tls: ssl.SSLContext | None = None) -> Iterator[Web]:
    """Start a server, and end it after the block."""
    web = Web()
    handler = type("OwnHandler", (Handler,), {"web": web})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        web.port = server.server_address[1]
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield web
        finally:
            server.shutdown()
            thread.join()
