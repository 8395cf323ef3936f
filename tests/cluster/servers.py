"""Real servers on the login machine of the test cluster: of the web, stores, hubs, registries."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster.site import PYTHON, REPOSITORY
from tests.support.hub import Hub
from tests.support.images import MAKE_IMAGE, blobs_sent, credentials, htpasswd, registry_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.cluster.site import Site

#: What the servers are called by the nodes, and their ports.
HOST, HTTPS_PORT, S3_PORT, BLOB_PORT, REGISTRY_PORT = "login", 8443, 5000, 10000, 5001
#: Where the web server redirects to what is beneath /moved/.
MOVED_PORT = 8447
#: A hub, and its server of large files, which nothing but an answer of the hub names.
HUB_PORT, CDN_PORT = 8445, 8446
_CONFIG = """
daemon off; worker_processes 2; pid {folder}/pid; error_log {folder}/error.log; user root;
events {{ }}
http {{
    log_format asked '$request_method $status $body_bytes_sent $http_range';
    access_log {folder}/access.log asked;
    client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
    uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
    server {{
        listen {port} ssl; listen {moved} ssl;
        rewrite ^/moved/(.*) https://$host:{moved}/$1 redirect;
        ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem;
        root {folder}/www; etag on;
        location /closed/ {{ auth_basic closed; auth_basic_user_file {folder}/users; }}
    }}
}}
"""
#: Starts docker-registry as a process that can be stopped: nsenter would stop with its own child.
_REGISTRY = """
cd /shared/registry
docker-registry serve config.yml >log 2>&1 & echo $! >pid
trap "kill -CONT $!; kill $!" TERM
wait
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

#: Azurite, where the Makefile installs it.
AZURITE = REPOSITORY / "build/azurite/node_modules/azurite/dist/src/blob/main.js"
#: Makes a container; the library of the ranks cannot. As Azure's Shared Key demands it.
MAKE_CONTAINER = """
import base64, hashlib, hmac, os, urllib.request
from email.utils import formatdate
account, endpoint, container = {account!r}, {endpoint!r}, {container!r}
sent = {{"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}}
named = "".join(f"{{name}}:{{value}}\\n" for name, value in sent.items())
place = f"/{{account}}/{{account}}/{{container}}\\nrestype:container"
text = "PUT" + 5 * "\\n" + "text/plain" + 7 * "\\n" + named + place
key = base64.b64decode(os.environ["AZURE_STORAGE_ACCOUNT_KEY"])
signature = base64.b64encode(hmac.digest(key, text.encode(), hashlib.sha256)).decode()
sent |= {{"Authorization": f"SharedKey {{account}}:{{signature}}", "Content-Type": "text/plain"}}
url = f"{{endpoint}}/{{container}}?restype=container"
urllib.request.urlopen(urllib.request.Request(url, b"", sent, method="PUT"), timeout=30)
"""


class Nginx:
    """nginx, which serves the files of ``files``: those in ``closed`` to a `user` alone."""

    #: The user and the password.
    user = "alice", "Wf7zXkNeverShown"

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
    config = _CONFIG.format(folder="/shared/nginx", port=HTTPS_PORT, moved=MOVED_PORT)
    (server.folder / "nginx.conf").write_text(config)
    (server.folder / "users").write_text("{}:{{PLAIN}}{}\n".format(*server.user))
    with running(site, ["nginx", "-c", "/shared/nginx/nginx.conf"], HTTPS_PORT):
        yield server


class Registry:
    """A registry with TLS, to which alice may push, and from which she alone may pull."""

    name = f"{HOST}:{REGISTRY_PORT}"
    #: The path of its authority's certificate, on all machines.
    certificate = "/shared/registry/ca.pem"

    def __init__(self, site: Site) -> None:
        self._site = site
        self.folder = site.shared("registry")

    def push(self, image: str, text: str, size: int = 1_000_000) -> None:
        """Push an image as ``image`` (NAME:TAG): see `MAKE_IMAGE`."""
        argv = ["bash", "-ec", MAKE_IMAGE, "make", f"{self.name}/{image}", text, str(size)]
        self._site.run(argv, env={"SSL_CERT_FILE": self.certificate})

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Have it answer nothing within a with block, and close no connection."""
        kill = "kill -{} $(cat /shared/registry/pid)"
        self._site.run(kill.format("STOP"), user="root")
        try:
            yield
        finally:
            self._site.run(kill.format("CONT"), user="root")

    def sent(self) -> Counter[str]:
        """Return how often each blob was sent."""
        return blobs_sent((self.folder / "log").read_text())


@contextmanager
def registry(site: Site) -> Iterator[Registry]:
    """Start a registry on the login machine. Alice has its password where docker keeps it."""
    server = Registry(site)
    shutil.rmtree(server.folder, ignore_errors=True)
    server.folder.mkdir(parents=True)
    _certify(server.folder)
    text = registry_config("/shared/registry/images", f":{REGISTRY_PORT}", "/shared/registry")
    (server.folder / "config.yml").write_text(text)
    (server.folder / "htpasswd").write_text(htpasswd())
    (server.folder / "log").touch()
    site.run(["sh", "-c", "umask 077; mkdir -p ~/.docker; cat >~/.docker/config.json"],
             input=credentials(server.name))  # fmt: skip
    try:
        with running(site, ["sh", "-c", _REGISTRY], REGISTRY_PORT):
            yield server
    finally:
        site.run(["rm", "-r", "/home/alice/.docker"])
        shutil.rmtree(server.folder)


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
    """Start a server of S3 on the login machine. Yield its endpoint. It logs to /shared/s3.log."""
    line = f"exec {sys.prefix}/bin/moto_server -H 0.0.0.0 -p {S3_PORT} >/shared/s3.log 2>&1"
    with running(site, ["sh", "-c", line], S3_PORT):
        yield f"http://{HOST}:{S3_PORT}"


class Azurite:
    """A server of Azure's blobs with one account and one container."""

    account, container = "ouraccount", "data"
    endpoint = f"http://{HOST}:{BLOB_PORT}/{account}"

    def __init__(self, site: Site, key: str) -> None:
        self._site = site
        self.log = site.shared("azurite.log")
        #: What a user's environment holds.
        self.environment = {
            "AZURE_STORAGE_ACCOUNT_KEY": key, "AZURE_STORAGE_ENDPOINT": self.endpoint,
        }  # fmt: skip

    def put(self, path: str, data: bytes, **metadata: str) -> None:
        """Write a blob as alice does."""
        self._site.shared("blob").write_bytes(data)
        self._run(
            "import obstore, sys; from obstore.store import AzureStore\n"
            f'store = AzureStore("{self.container}", account_name="{self.account}", '
            'client_options={"allow_http": True})\n'
            f'obstore.put(store, {path!r}, open("/shared/blob", "rb").read(), '
            f"attributes={metadata!r})"
        )

    def put_all(self, folder: str, prefix: str) -> None:
        """Write the files of a folder that all machines see as blobs."""
        self._run(
            "import obstore, os; from obstore.store import AzureStore\n"
            f'store = AzureStore("{self.container}", account_name="{self.account}", '
            'client_options={"allow_http": True})\n'
            f"for one in os.scandir({folder!r}):\n"
            f'    obstore.put(store, {prefix!r} + one.name, open(one.path, "rb").read())'
        )

    def asked(self) -> Counter[str]:
        """Return how often data of each blob was asked for, by its path in the container."""
        place = f"/{self.account}/{self.container}/"
        return Counter(
            re.findall(rf'"GET {place}([^? ]+)\S* HTTP/1.1" 20[06] ', self.log.read_text())
        )

    def make_container(self) -> None:
        """Make the container."""
        names = {"account": self.account, "endpoint": self.endpoint, "container": self.container}
        self._run(MAKE_CONTAINER.format(**names))

    def _run(self, program: str) -> None:
        self._site.run([PYTHON, "-c", program], env=self.environment)

    def served(self) -> tuple[int, int]:
        """Return how many requests for data there were, and the bytes that were sent."""
        sent = re.findall(r'"GET \S+ HTTP/1.1" 20[06] (\d+)', self.log.read_text())
        return len(sent), sum(map(int, sent))


@contextmanager
def azurite(site: Site, key: str) -> Iterator[Azurite]:
    """Start a server of Azure's blobs on the login machine, whose account has this ``key``."""
    server = Azurite(site, key)
    line = f"exec node {AZURITE} --inMemoryPersistence --blobHost 0.0.0.0 --blobPort {BLOB_PORT}"
    accounts = {"AZURITE_ACCOUNTS": f"{server.account}:{key}"}
    argv = ["sh", "-c", f"{line} >/shared/{server.log.name} 2>&1"]
    with running(site, argv, BLOB_PORT, environment=accounts):
        server.make_container()
        yield server


@contextmanager
def running(
    site: Site, argv: list[str], *ports: int, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a server of these ports on the login machine until the end of the block."""
    process = site.popen(argv, user="root", env={"HOME": "/root", **(environment or {})})
    try:
        deadline = time.monotonic() + 60
        probe = " && ".join(f"exec 3<>/dev/tcp/127.0.0.1/{port}" for port in ports)
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
