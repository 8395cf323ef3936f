"""A web server on the login machine that fails in the way that an object's name says.

``python -m tests.cluster.faulty PORT``
"""

from __future__ import annotations

import sys
import threading
from http.server import ThreadingHTTPServer

from tests.support.web import Handler, Web

#: Bytes of each object. Each byte of a version is the version's number.
SIZE = 30_000_000
#: What S3 and Azure answer when a token, or a signature, has expired.
_TOKEN = (
    b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message>"
    b"<Token-0>the token</Token-0></Error>"
)
_SIGNATURE = (
    b"<Error><Code>AuthenticationFailed</Code><Message>Server failed to authenticate the request."
    b"\nRequestId:1</Message><AuthenticationErrorDetail>Signature not valid in the specified time "
    b"frame: Expiry [Sat, 21 Nov 2026]</AuthenticationErrorDetail></Error>"
)


class FaultyHandler(Handler):
    """Answers one connection; ``/swap-N`` is replaced N times, each after two ranges were asked."""

    _lock = threading.Lock()
    #: The version of each object, and the ranges of it that were asked for.
    _versions: dict[str, tuple[int, int]] = {}  # noqa: RUF012 - of all connections

    def do_HEAD(self) -> None:  # noqa: N802 - http.server's name
        """Answer with the facts of the object; refusals have no text."""
        self._use(self._versions.get(self.path, (1, 0))[0])
        refused = {"/bucket/expired": 400, "/account/container/expired": 403}.get(self.path)
        self.answer(refused or 200, b"" if refused else self.web.data, body=False)

    def do_GET(self) -> None:  # noqa: N802 - http.server's name
        """Answer with a range of the object, or fail."""
        self._use(self._next_version())
        match self.path:
            case "/bucket/expired":
                self.refuse(400, _TOKEN)
            case "/account/container/expired":
                self.refuse(403, _SIGNATURE)
            case "/hang":
                self.hang()
            case "/reset":
                self.reset()
            case "/larger":
                self.send_more()
            case _:
                super().do_GET()

    def _next_version(self) -> int:
        with self._lock:
            version, asked = self._versions.get(self.path, (1, 0))
            if asked == 2 and version <= int(self.path.partition("-")[2] or 0):
                version, asked = version + 1, 0
            self._versions[self.path] = version, asked + 1
            return version

    def _use(self, version: int) -> None:
        """Let this connection see a version."""
        self.web = Web()
        self.web.data = bytes([version]) * SIZE
        self.web.etag = f'"{version}"'
        self.web.modified = f"Sat, 21 Nov 2026 10:{version // 60:02}:{version % 60:02} GMT"


if __name__ == "__main__":
    ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), FaultyHandler).serve_forever()
