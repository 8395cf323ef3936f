"""A real web server that speaks as a hub of models does, with a second one for large files.

Its state is a folder, so a test can commit to a model while the server runs in another process, on
another machine of the test cluster: ``python hub.py FOLDER PORT CDN_PORT HOST CERTIFICATE KEY``.
"""

from __future__ import annotations

import hashlib
import json
import ssl
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: Bytes from which a file is read from the second server, and entries in a page of a listing.
LARGE, PAGE = 10_000, 3


class Hub:
    """What the hub holds, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._state, self._log = folder / "state.json", folder / "log"
        #: Statuses with which the next requests of a server in this process are answered.
        self.faults: list[int] = []
        self.endpoint = self.cdn = ""

    def create(self, **settings: Any) -> None:
        """Make the empty folder of a hub; ``settings`` are kept in its state."""
        (self.folder / "blobs").mkdir(parents=True)
        self._log.touch()
        self.set(repositories={}, signature="1", token="", renamed={}, **settings)

    @property
    def state(self) -> dict[str, Any]:
        """Return the settings: repositories, the valid signature, the token that is demanded."""
        found: dict[str, Any] = json.loads(self._state.read_text())
        return found

    def set(self, **settings: Any) -> None:
        """Change settings."""
        state = self.state if self._state.exists() else {}
        new = self._state.with_suffix(".new")
        new.write_text(json.dumps(state | settings))
        new.rename(self._state)

    def commit(self, name: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Make ``files`` the contents of a branch of ``models/ORG/MODEL``. Return the commit."""
        tree = {path: self._store(data) for path, data in files.items()}
        commit = hashlib.sha1(json.dumps(tree).encode()).hexdigest()
        repositories = self.state["repositories"]
        one = repositories.setdefault(name, {"branches": {}, "commits": {}})
        one["commits"][commit] = tree
        one["branches"][branch] = commit
        self.set(repositories=repositories)
        return commit

    def blob(self, name: str) -> bytes:
        """Return the contents of a file."""
        return (self.folder / "blobs" / name).read_bytes()

    def _store(self, data: bytes) -> str:
        name = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        (self.folder / "blobs" / name).write_bytes(data)
        return name

    def note(self, **request: Any) -> None:
        """Note a request."""
        with self._log.open("a") as log:
            log.write(json.dumps(request) + "\n")

    def asked(self, server: str = "", path: str = "") -> list[dict[str, Any]]:
        """Return the requests to ``server``, hub or cdn, whose path contains ``path``."""
        lines = map(json.loads, self._log.read_text().splitlines())
        return [one for one in lines if server in one["server"] and path in one["path"]]

    def served(self) -> dict[str, int]:
        """Return the bytes of files that were sent, by the last part of their path."""
        sent: dict[str, int] = {}
        for one in self.asked():
            if one["bytes"]:
                name = one["path"].rpartition("/")[2].partition("?")[0]
                sent[name] = sent.get(name, 0) + one["bytes"]
        return sent


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    server_name: str

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer one request."""
        self._sent = 0
        self.state = self.hub.state
        self.url = urlsplit(self.path)
        fault = self.hub.faults.pop(0) if self.hub.faults else 0
        status = fault or self._authorize() or self.route()
        if status != 200:
            self.send(status, b'{"error": "as the hub says"}')

    def _authorize(self) -> int:
        raise NotImplementedError

    def route(self) -> int:
        """Answer and return 200, or return an error's status."""
        raise NotImplementedError

    def send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> int:
        """Note the request, and send an answer. Return 200."""
        self.hub.note(
            server=self.server_name, path=self.path, bytes=self._sent,
            authorization=self.headers.get("Authorization"),
        )  # fmt: skip
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
        return 200

    def send_data(self, data: bytes, headers: Mapping[str, str] | None = None) -> int:
        """Send the range of a file that was asked for, or all of it."""
        given = self.headers.get("Range")
        if not given:
            return self.send(200, data, headers)
        first, last = map(int, given.removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        self._sent = len(part)
        span = {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}"}
        return self.send(206, part, {**(headers or {}), **span})


class _HubHandler(_Handler):
    def _authorize(self) -> int:
        token = self.state["token"]
        given = self.headers.get("Authorization", "")
        return 0 if not token or given == f"Bearer {token}" else 403 if given else 401

    def route(self) -> int:
        parts = [unquote(part) for part in self.url.path.strip("/").split("/")]
        if old := next((one for one in self.state["renamed"] if one in self.url.path), ""):
            new = self.path.replace(old, self.state["renamed"][old])
            return self.send(307, b"", {"Location": new})
        is_api = parts[0] == "api"
        parts = parts[is_api:]
        if parts[0] not in ("models", "datasets"):
            parts.insert(0, "models")
        repository = self.state["repositories"].get("/".join(parts[:3]))
        if repository is None:
            return 404
        act = {"revision": self._revision, "tree": self._tree, "resolve": self._resolve}[parts[3]]
        commit = repository["branches"].get(parts[4], parts[4])
        files = repository["commits"].get(commit)
        return 404 if files is None else act(commit, files, "/".join(parts[5:]))

    def _revision(self, commit: str, files: Mapping[str, str], _: str) -> int:
        siblings = [{"rfilename": path} for path in files]
        found = {"id": "a/b", "sha": commit, "siblings": siblings}
        return self.send(200, json.dumps(found).encode())

    def _tree(self, _commit: str, files: Mapping[str, str], _: str) -> int:
        begin = int(parse_qs(self.url.query).get("cursor", ["0"])[0])
        folders = {path.rpartition("/")[0] for path in files} - {""}
        entries: list[dict[str, Any]] = [
            {"type": "directory", "path": one, "oid": "0", "size": 0} for one in folders
        ]
        for path, blob in files.items():
            size = len(self.hub.blob(blob))
            entry: dict[str, Any] = {"type": "file", "path": path, "size": size, "oid": blob}
            if size >= LARGE:
                digest = hashlib.sha256(self.hub.blob(blob)).hexdigest()
                entry["lfs"] = {"oid": digest, "size": size, "pointerSize": 134}
            entries.append(entry)
        headers = {}
        if begin + PAGE < len(entries):
            path = f"{self.hub.endpoint}{self.url.path}?recursive=true&cursor={begin + PAGE}"
            headers = {"Link": f'<{path}>; rel="next"'}
        return self.send(200, json.dumps(entries[begin : begin + PAGE]).encode(), headers)

    def _resolve(self, commit: str, files: Mapping[str, str], path: str) -> int:
        if path not in files:
            return 404
        data = self.hub.blob(files[path])
        headers = {"X-Repo-Commit": commit, "ETag": f'"{files[path]}"'}
        if len(data) < LARGE:
            return self.send_data(data, headers)
        where = f"{self.hub.cdn}/{files[path]}/{quote(path)}?signature={self.state['signature']}"
        linked = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": headers["ETag"]}
        return self.send(302, b"", {**headers, **linked, "Location": where})


class _CdnHandler(_Handler):
    def _authorize(self) -> int:
        if "Authorization" in self.headers:
            return 400
        return 0 if self.url.query == f"signature={self.state['signature']}" else 403

    def route(self) -> int:
        return self.send_data(self.hub.blob(self.url.path.split("/")[1]))


@contextmanager
def serving(
    hub: Hub,
    ports: tuple[int, int] = (0, 0),
    host: str = "127.0.0.1",
    certificate: tuple[str, str] | None = None,
) -> Iterator[Hub]:
    """Run both servers until the end of the block."""
    scheme = "https" if certificate else "http"
    servers = []
    for name, kind, port in zip(("hub", "cdn"), (_HubHandler, _CdnHandler), ports, strict=True):
        handler = type("Handler", (kind,), {"hub": hub, "server_name": name})
        server = ThreadingHTTPServer(("" if certificate else host, port), handler)
        if certificate:
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(*certificate)
            server.socket = tls.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        servers.append(server)
    hub.endpoint, hub.cdn = (f"{scheme}://{host}:{server.server_address[1]}" for server in servers)
    threads = [
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        for server in servers
    ]
    try:
        for thread in threads:
            thread.start()
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()


def _main() -> None:
    folder, port, cdn_port, host, certificate, key = sys.argv[1:]
    with serving(Hub(Path(folder)), (int(port), int(cdn_port)), host, (certificate, key)):
        threading.Event().wait()


if __name__ == "__main__":
    _main()
