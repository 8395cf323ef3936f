"""Real container images and the configuration of a real registry (docker-registry)."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter

#: A user of the registry. No record, log, list of processes or description of a job may have the
#: password in it, nor what `credentials` makes of it.
USER, PASSWORD = "alice", "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"
#: A line of htpasswd with its bcrypt (``htpasswd -bnBC5 USER PASSWORD``).
_HTPASSWD = f"{USER}:$2y$05$abcdefghijklmnopqrstuuAcFlGFJJuAMRQP/6B69cdycZ9IiVZ/q\n"
#: Makes an image of two layers of files, between which a file is deleted, and pushes it as $1.
#: What is in $2 is in one of the files; $3 random bytes are in another.
MAKE_IMAGE = """
work=$(mktemp -d); cd $work
mkdir -p first/data first/etc first/locked second
echo "$2" >first/data/kept; echo old >first/data/deleted; ln -s kept first/data/link
head -c $3 /dev/urandom >first/data/random; chmod 0 first/locked; echo new >second/added
umoci init --layout layout
umoci new --image layout:tag
umoci insert --rootless --image layout:tag first /
umoci insert --rootless --image layout:tag --whiteout /data/deleted
umoci insert --rootless --image layout:tag second/added /data/added
umoci config --image layout:tag --config.env GREETING=hello --config.workingdir /data
skopeo copy --quiet ${4-} oci:layout:tag docker://$1
chmod 700 first/locked; rm -r $work
"""
#: The blobs of that image: three layers and the configuration.
BLOBS = 4
#: What is in it, and in the squashfs file, as unsquashfs lists the names.
NAMES = ["", "/data", "/data/added", "/data/kept", "/data/link", "/data/random", "/etc",
         "/etc/environment", "/etc/fstab", "/etc/rc", "/etc/rc.local", "/locked"]  # fmt: skip


def registry_config(folder: str, address: str, certificates: str = "") -> str:
    """Return the configuration of a registry that keeps its images in ``folder``.

    With a folder of ``certificates`` it has TLS, and asks for the password.
    """
    config: dict[str, object] = {
        "version": "0.1",
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": folder}},
        "http": {"addr": address},
    }
    if certificates:
        tls = {"certificate": f"{certificates}/cert.pem", "key": f"{certificates}/key.pem"}
        config["http"] = {"addr": address, "tls": tls}
        path = f"{certificates}/htpasswd"
        config["auth"] = {"htpasswd": {"realm": "registry", "path": path}}
    return json.dumps(config)  # JSON is YAML


def htpasswd() -> str:
    """Return the file of users that `registry_config` names."""
    return _HTPASSWD


def credentials(registry: str) -> str:
    """Return the user's file of credentials, as ``skopeo login`` writes it."""
    return json.dumps({"auths": {registry: {"auth": encoded()}}})


def encoded() -> str:
    """Return user and password as they are in a file of credentials and in a request."""
    return base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


def blobs_sent(log: str) -> Counter[str]:
    """Return how often each blob was sent, from the registry's log."""
    return Counter(re.findall(r'"GET \S+/blobs/(sha256:\w+) HTTP/1.1" 200 ', log))
