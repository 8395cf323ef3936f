"""Real servers on the login machine of the test cluster: of the web, of S3, and a hub."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.hub import Hub

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.site import Site

#: What the servers are called by the nodes, and their ports.
HOST, HTTPS_PORT, S3_PORT = "login", 8443, 5000
#: A hub, and its server of large files. Ranks do not announce themselves to ports below 1024.
HUB_PORT, CDN_PORT = 8445, 444
_CONFIG = """
daemon off; worker_processes 2; pid {folder}/pid; error_log {folder}/error.log; user root;
events {{ }}
http {{
    log_format asked '$request_method $status $body_bytes_sent $http_range';
    access_log {folder}/access.log asked;
    client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
    uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
    server {{
        listen {port} ssl;
        ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem;
        root {folder}/www; etag on;
    }}
}}
"""
#: An authority of the site's own, and the server's certificate by it.
_CERTIFICATES = f"""
key="-newkey rsa:2048 -nodes"
openssl req -x509 $key -days 2 -subj /CN=authority -keyout ca.key -out ca.pem
openssl req $key -subj /CN={HOST} -keyout key.pem -out cert.csr
echo "subjectAltName=DNS:{HOST}" >names
openssl x509 -req -days 2 -in cert.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile names \\
    -out cert.pem
"""


class Nginx:
    """nginx, which serves the files of ``files``."""

    def __init__(self, site: Site) -> None:
        self.folder = site.shared("nginx")
        self.files = self.folder / "www"

    @property
    def certificate(self) -> str:
        """The path of its authority's certificate, on all machines."""
        return "/shared/nginx/ca.pem"

    def served(self) -> tuple[int, int]:
        """Return how many requests for data there were, and the bytes that were sent."""
        log = (self.folder / "access.log").read_text().splitlines()
        sent = [int(line.split()[2]) for line in log if line.startswith("GET 206")]
        return len(sent), sum(sent)


@contextmanager
def nginx(site: Site) -> Iterator[Nginx]:
    """Start nginx on the login machine, and end it after the block."""
    server = Nginx(site)
    shutil.rmtree(server.folder, ignore_errors=True)
    server.files.mkdir(parents=True)
    _certify(server.folder)
    config = _CONFIG.format(folder="/shared/nginx", port=HTTPS_PORT)
    (server.folder / "nginx.conf").write_text(config)
    with running(site, ["nginx", "-c", "/shared/nginx/nginx.conf"], HTTPS_PORT):
        yield server


@contextmanager
def hub(site: Site) -> Iterator[Hub]:
    """Start a hub on the login machine, and end it after the block."""
    served = Hub(site.shared("hub"))
    shutil.rmtree(served.folder, ignore_errors=True)
    served.create()
    served.endpoint = f"https://{HOST}:{HUB_PORT}"
    _certify(served.folder)
    program = Path(__file__).parents[1] / "support/hub.py"
    ports = str(HUB_PORT), str(CDN_PORT)
    keys = "/shared/hub/cert.pem", "/shared/hub/key.pem"
    argv = [sys.executable, str(program), "/shared/hub", *ports, HOST, *keys]
    with running(site, argv, HUB_PORT):
        yield served


def _certify(folder: Path) -> None:
    """Make an authority, ca.pem, and a certificate by it."""
    subprocess.run(["sh", "-ec", _CERTIFICATES], cwd=folder, check=True, capture_output=True)


@contextmanager
def s3(site: Site) -> Iterator[str]:
    """Start a server of S3 on the login machine. Yield its endpoint."""
    program = Path(sys.prefix) / "bin/moto_server"
    with running(site, [str(program), "-H", "0.0.0.0", "-p", str(S3_PORT)], S3_PORT):
        yield f"http://{HOST}:{S3_PORT}"


@contextmanager
def running(site: Site, argv: list[str], port: int) -> Iterator[None]:
    """Run a server on the login machine until the end of the block."""
    process = site.popen(argv, user="root", env={"HOME": "/root"})
    try:
        deadline = time.monotonic() + 60
        probe = f"exec 3<>/dev/tcp/127.0.0.1/{port}"
        while site.run(probe, check=False).returncode:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, f"{argv[0]} does not listen"
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.communicate()


def write_object(path: Path, size: int) -> bytes:
    """Write a file of random bytes that everybody may read. Return its bytes."""
    data = os.urandom(size)
    path.write_bytes(data)
    return data
