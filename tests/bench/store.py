"""A store of S3 made of a folder: nginx sends the objects, and this program lists them.

``python3 store.py FOLDER LISTING_PORT DELAY_PORT SECONDS`` answers what nginx passes on: on one
port lists of the files in a folder, on the other, after so many seconds, that a request may go on.
Uses only the standard library, because it runs on the login machine of the test cluster.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

#: nginx, which sends files at once on the first port. On the second, each answer comes late, and no
#: connection is faster than ``rate``.
CONFIG = """
daemon off; worker_processes 2; pid {folder}/pid; error_log {folder}/error.log; user root;
events {{ worker_connections 1024; }}
http {{
    access_log off; sendfile on; tcp_nopush on; keepalive_requests 100000;
    client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
    uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5; root {folder}/www;
    server {{
        listen 8080;
        location = /bucket {{ proxy_pass http://127.0.0.1:8082; }}
    }}
    server {{
        listen 8081; limit_rate {rate};
        auth_request /delay;
        location = /bucket {{ proxy_pass http://127.0.0.1:8082; }}
        location = /delay {{
            internal; proxy_pass http://127.0.0.1:8083;
            proxy_pass_request_body off; proxy_set_header Content-Length "";
        }}
    }}
}}
"""


def listing(folder: Path, prefix: str) -> bytes:
    """Return the list of all files whose names in ``folder`` begin with ``prefix``."""
    found = []
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name.startswith(prefix):
            facts = path.stat()
            when = datetime.fromtimestamp(int(facts.st_mtime), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            etag = f"&quot;{int(facts.st_mtime):x}-{facts.st_size:x}&quot;"  # as nginx makes it
            found.append(
                f"<Contents><Key>{name}</Key><LastModified>{when}</LastModified>"
                f"<ETag>{etag}</ETag><Size>{facts.st_size}</Size></Contents>"
            )
    text = f"<ListBucketResult><Name>bucket</Name>{''.join(found)}</ListBucketResult>"
    return text.encode()


async def serve(folder: Path, ports: tuple[int, int], seconds: float) -> None:
    """Answer on both ports until the process is ended."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if writer.get_extra_info("sockname")[1] == ports[1]:
            await asyncio.sleep(seconds)
            body = b""
        else:
            query = parse_qs(urlsplit(head.split()[1]).query)
            body = listing(folder, query.get("prefix", [""])[0])
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    servers = [await asyncio.start_server(answer, "127.0.0.1", port) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    place, listing_port, delay_port, late = sys.argv[1:]
    asyncio.run(serve(Path(place), (int(listing_port), int(delay_port)), float(late)))
