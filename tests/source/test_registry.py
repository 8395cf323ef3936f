"""Look at images in a real registry, and make squashfs files of them."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import threading
import time
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import SourceError, SpaceError, UsageError
from stager.source.access import look_at
from stager.source.description import Listings, Selection
from stager.source.endpoints import RemoteSettings
from stager.source.image_name import ImageName
from stager.source.registry import (
    _ARCHITECTURES,
    _for_this_machine,
    _layers_size,
    _refusal,
    import_image,
    look_at_image,
)
from tests.support.images import BLOBS, MAKE_IMAGE, NAMES, blobs_sent, registry_config

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Registry:
    folder: Path
    address: str

    @property
    def settings(self) -> RemoteSettings:
        return RemoteSettings(patience=20, insecure_registries=(self.address,))

    @property
    def url(self) -> str:
        return f"docker://{self.address}/team/img:v1"

    def push(self, text: str = "one", image: str = "team/img:v1") -> None:
        argv = ["make", f"{self.address}/{image}", text, "100000", "--dest-tls-verify=false"]
        subprocess.run(["bash", "-ec", MAKE_IMAGE, *argv], check=True, capture_output=True)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


def can_connect(host: str, port: int) -> bool:
    with socket.socket() as client:
        return not client.connect_ex((host, port))


@contextmanager
def serving(folder: Path) -> Iterator[Registry]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    (folder / "config.yml").write_text(registry_config(str(folder / "images"), address))
    with (folder / "log").open("w") as log:
        argv = ["docker-registry", "serve", str(folder / "config.yml")]
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 20
        host, port = address.split(":")
        while not can_connect(host, int(port)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield Registry(folder, address)
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def shared_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with serving(tmp_path_factory.mktemp("registry")) as registry:
        registry.push()
        yield registry


@pytest.fixture
def registry(shared_registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    return shared_registry


def fault(url: str, settings: RemoteSettings) -> str:
    with pytest.raises(SourceError) as caught:
        look_at_image(url, settings)
    return str(caught.value)


def test_an_image_is_identified_by_its_digest_and_no_layer_is_asked_for(
    registry: Registry,
) -> None:
    before = registry.log
    source = look_at_image(registry.url, registry.settings)
    assert source.facts.revision.startswith("sha256:")
    assert (source.mode, source.is_tree) == (0o600, False)
    assert 100_000 < source.facts.size < 110_000
    by_digest = f"docker://{registry.address}/team/img@{source.facts.revision}"
    assert look_at_image(by_digest, registry.settings) == source
    assert blobs_sent(registry.log.removeprefix(before)) == {}


def test_the_size_of_an_image_for_several_machines_is_that_for_this_one(
    registry: Registry, tmp_path: Path
) -> None:
    one = look_at_image(registry.url, registry.settings)
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    images = [
        {
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": one.facts.revision, "size": 1, "platform": platform,
        }
        for platform in ({"os": "linux", "architecture": machine}, {"os": "plan9"})
    ]  # fmt: skip
    text = json.dumps({"schemaVersion": 2, "manifests": images})
    media = "application/vnd.oci.image.index.v1+json"
    url = f"http://{registry.address}/v2/team/img/manifests/several"
    headers = {"Content-Type": media}
    put = urllib.request.Request(url, text.encode(), headers, method="PUT")
    urllib.request.urlopen(put, timeout=30).close()
    several = look_at_image(registry.url.replace(":v1", ":several"), registry.settings)
    assert several.facts.size == one.facts.size
    assert several.facts.revision != one.facts.revision


def test_an_image_becomes_a_squashfs_file(registry: Registry, tmp_path: Path) -> None:
    source = look_at_image(registry.url, registry.settings)
    texts: list[bytes] = []
    for name in ("first", "second"):
        before = registry.log
        folder = tmp_path / name
        folder.mkdir()
        made = import_image(
            registry.url, source.facts.revision, str(folder), registry.settings, lambda: None
        )
        assert made == (f"{folder}/image.sqsh", 0)
        sent = blobs_sent(registry.log.removeprefix(before))
        assert (len(sent), set(sent.values())) == (BLOBS, {1})
        texts.append(Path(made.path).read_bytes())
    assert texts[0] == texts[1]
    tree = tmp_path / "tree"
    subprocess.run(["unsquashfs", "-q", "-n", "-d", tree, made.path], check=True)
    found = ["", *(f"/{path.relative_to(tree)}" for path in sorted(tree.rglob("*")))]
    assert found == NAMES
    assert (tree / "data/kept").read_text() == "one\n"
    assert (tree / "data/link").readlink() == Path("kept")
    assert (tree / "etc/environment").read_text().endswith("GREETING=hello\n")


def test_what_was_looked_at_is_pulled_though_the_tag_moved(
    registry: Registry, tmp_path: Path
) -> None:
    url = registry.url.replace("team/img", "team/moved")
    registry.push("one", "team/moved:v1")
    before = look_at_image(url, registry.settings)
    registry.push("two", "team/moved:v1")
    assert look_at_image(url, registry.settings).facts != before.facts
    made = import_image(url, before.facts.revision, str(tmp_path), registry.settings, lambda: None)
    argv = ["unsquashfs", "-cat", made.path, "data/kept"]
    assert subprocess.run(argv, capture_output=True, check=True).stdout == b"one\n"


def test_layers_may_be_compressed_by_zstd(registry: Registry, tmp_path: Path) -> None:
    layout, url = f"oci:{tmp_path}/layout:tag", registry.url.replace("team/img", "team/zstd")
    copy, plain = ["skopeo", "copy", "--quiet"], ["--src-tls-verify=false"]
    zstd = ["--dest-compress-format", "zstd"]
    subprocess.run([*copy, *plain, *zstd, registry.url, layout], check=True)
    subprocess.run([*copy, "--dest-tls-verify=false", layout, url], check=True)
    manifest = ["skopeo", "inspect", "--raw", "--tls-verify=false", url]
    layers = json.loads(subprocess.run(manifest, capture_output=True, check=True).stdout)["layers"]
    assert {one["mediaType"].rpartition("+")[2] for one in layers} == {"zstd"}
    source = look_at_image(url, registry.settings)
    folder = tmp_path / "made"
    folder.mkdir()
    made = import_image(url, source.facts.revision, str(folder), registry.settings, lambda: None)
    argv = ["unsquashfs", "-cat", made.path, "data/kept"]
    assert subprocess.run(argv, capture_output=True, check=True).stdout == b"one\n"


def test_a_check_that_fails_ends_it(registry: Registry, tmp_path: Path) -> None:
    def check() -> None:
        raise SpaceError("too large")

    source = look_at_image(registry.url, registry.settings)
    with pytest.raises(SpaceError, match=r"^too large$"):
        import_image(registry.url, source.facts.revision, str(tmp_path), registry.settings, check)


def test_a_connection_that_fails_is_tried_again(registry: Registry, tmp_path: Path) -> None:
    source = look_at_image(registry.url, registry.settings)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"127.0.0.1:{proxy.getsockname()[1]}"
        threading.Thread(target=pass_on, args=(proxy, registry.address), daemon=True).start()
        url = f"docker://{address}/team/img:v1"
        settings = replace(registry.settings, insecure_registries=(address,))
        made = import_image(url, source.facts.revision, str(tmp_path), settings, lambda: None)
        proxy.shutdown(socket.SHUT_RDWR)
    assert made.retries >= 1


def pass_on(proxy: socket.socket, address: str) -> None:
    """Close the first connections; pass on what comes by the others."""
    host, port = address.split(":")
    with suppress(OSError):
        for number in itertools.count():
            client, _ = proxy.accept()
            if number < 3:
                client.close()
                continue
            server = socket.create_connection((host, int(port)))
            for one, other in ((client, server), (server, client)):
                threading.Thread(target=pump, args=(one, other), daemon=True).start()


def pump(one: socket.socket, other: socket.socket) -> None:
    with one, suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


def test_what_is_missing_is_told_at_once(registry: Registry) -> None:
    for image in ("team/img:v2", "team/nothing:v1"):
        name, tag = image.split(":")
        url = f"docker://{registry.address}/{image}"
        assert fault(url, registry.settings) == (
            f"{url}: no such image (skopeo: reading manifest {tag} in {registry.address}/{name}: "
            "manifest unknown: manifest unknown); check the URL"
        )


def test_a_registry_without_tls_must_be_named_by_the_site(registry: Registry) -> None:
    settings = replace(registry.settings, insecure_registries=())
    assert fault(registry.url, settings) == (
        f"{registry.url}: the registry has no TLS (skopeo: pinging container registry "
        f'{registry.address}: Get "https://{registry.address}/v2/": http: server gave HTTP '
        "response to HTTPS client); ask the administrator (insecure_registries in [source] of "
        "stage.toml)"
    )


def test_a_registry_that_does_not_answer_is_given_up(registry: Registry) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        url = f"docker://{address}/a"
        hasty = replace(registry.settings, patience=1, insecure_registries=(address,))
        assert fault(url, hasty) == (
            f"{url}: the registry did not answer, once in 1 s; submit again later, or tell "
            "those who run the registry"
        )
    # The port is closed now. How often skopeo starts within the patience is the machine's affair.
    told = fault(url, replace(registry.settings, patience=5, insecure_registries=(address,)))
    assert told.startswith(f"{url}: the registry cannot be reached, or fails (skopeo: ")
    assert re.search(
        r" times in \d+ s; submit again later, or tell those who run the registry", told
    )


def test_files_that_cannot_be_read_are_named(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fault(registry.url, replace(registry.settings, ca_file="/absent")) == (
        "ca_file in [source] of stage.toml, /absent: it cannot be read; tell the administrator"
    )
    monkeypatch.setenv("REGISTRY_AUTH_FILE", "/absent/auth.json")
    assert fault(registry.url, registry.settings) == (
        "your file of credentials for registries cannot be read here; have REGISTRY_AUTH_FILE name "
        "a file that all nodes can read\n  /absent/auth.json"
    )


def test_programs_that_are_not_installed_are_named_with_their_packages(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fault(registry.url, registry.settings) == (
        "skopeo is needed for images, but not installed on this node; tell the administrator "
        "(packages: skopeo)"
    )
    (tmp_path / "skopeo").touch(mode=0o755)
    with pytest.raises(SourceError) as caught:
        import_image(registry.url, "sha256:0", str(tmp_path), registry.settings, lambda: None)
    assert str(caught.value) == (
        "umoci and mksquashfs are needed for images, but not installed on this node; tell the "
        "administrator (packages: umoci squashfs-tools)"
    )


def test_an_image_has_no_patterns(registry: Registry) -> None:
    with pytest.raises(UsageError) as caught:
        look_at(registry.url, Selection(("*.py",)), Listings(), registry.settings)
    assert str(caught.value) == f"{registry.url} is one image; remove include and exclude"


@pytest.mark.parametrize(
    "manifest",
    [
        b'{"layers": [{"size": 1e999}]}',
        b'{"layers": [{"size": -500}]}',
        b'{"layers": [{"size": 1' + b"0" * 400 + b"}]}",
        b'{"layers": [{"size": "1"}]}',
        b'{"layers": 5}',
        b"[1]",
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_a_manifest_with_odd_sizes_is_told(manifest: bytes) -> None:
    with pytest.raises(SourceError) as caught:
        _layers_size("docker://host:1/a", manifest)
    assert str(caught.value) == "docker://host:1/a: its manifest cannot be read; check the image"


@pytest.mark.parametrize("digest", ["\\u0000", "\\ud800", "sha256:1", "--help"])
def test_a_list_of_images_with_odd_digests_is_told(digest: str) -> None:
    machine = os.uname().machine
    platform = {"os": "linux", "architecture": _ARCHITECTURES.get(machine, machine)}
    text = f'{{"manifests": [{{"platform": {json.dumps(platform)}, "digest": "{digest}"}}]}}'
    with pytest.raises(SourceError) as caught:
        _for_this_machine("docker://host:1/a", text.encode())
    assert str(caught.value) == "docker://host:1/a: its manifest cannot be read; check the image"


@pytest.mark.parametrize("name", ["a", "t", "e", "team/unauthorized"])
def test_the_name_of_an_image_is_not_taken_for_what_is_said(name: str) -> None:
    image = ImageName("host:1", name, "latest", "")
    for said, meant in (
        ("unauthorized: authentication required", "you may not read it"),
        ("manifest unknown", "no such image"),
    ):
        text = f"reading manifest latest in host:1/{name}: {said}"
        assert str(_refusal(text, image)) == f"{meant} (skopeo: {text})"


@pytest.mark.parametrize("said", ["EOF", "http: server closed idle connection"])
def test_a_connection_that_was_closed_may_be_opened_again(said: str) -> None:
    text = f'pinging container registry host:1: Get "https://host:1/v2/": {said}'
    failure = _refusal(text, ImageName("host:1", "a", "latest", ""))
    assert failure.why.may_pass
    assert str(failure) == f"the registry cannot be reached, or fails (skopeo: {text})"
