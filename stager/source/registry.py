"""Look at container images in registries, and make squashfs files of them.

skopeo speaks to the registry, umoci unpacks the layers, and mksquashfs packs the result. An image
is identified by the digest of its manifest, which is also what is pulled: a tag may move meanwhile.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from stager.base.errors import SourceError
from stager.base.telemetry import Kind, doing
from stager.base.text import printable
from stager.fs.files import as_stage_error, remove_tree
from stager.source.description import Source, SourceFacts
from stager.source.endpoints import AUTH_FILE
from stager.source.image_name import ImageName, is_digest
from stager.source.image_tree import complete, config_of
from stager.source.retry import Patience, RefusedError
from stager.source.tool import Finished, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from stager.source.endpoints import RemoteSettings

T = TypeVar("T")

#: What of this rank's environment the programs get: nothing of MPI, Slurm or other stores.
_KEPT = (AUTH_FILE, "PATH", "LD_LIBRARY_PATH", "TZ")
#: Permissions of the copy, as of objects: what opens the registry is a credential of the user's.
_MODE = 0o600
#: The programs, with the packages that have them.
_TOOLS = {"skopeo": "skopeo", "umoci": "umoci", "mksquashfs": "squashfs-tools"}
#: What machines are called by images; all others are called alike.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
#: Bytes of what a program said that a message repeats: the end says most.
_MOST_SAID = 300
#: What skopeo writes in a line of its log, and what may be signed in the URLs there.
_MESSAGE = re.compile(r'level=(?:fatal|error) msg="((?:[^"\\]|\\.)*)"')
_QUERY = re.compile(r"\?[^\s\"']*")
#: How its messages begin: the URL, which is said anyway.
_BEGINNING = re.compile(
    r'(FATA\S+ )?(Error )?(parsing image name "[^"]*"|initializing source \S+): ', re.IGNORECASE
)
#: The same level as of `stagectl pack`: mksquashfs's own, 15, takes ten times as long.
_ZSTD = ("-comp", "zstd", "-Xcompression-level", "3")
#: umoci 0.4.7 reads no layers by zstd. Those by gzip, which is the usual, stay as they are.
_GZIP = ("--dest-compress-format", "gzip", "--dest-compress-level", "1")
#: More bytes than any layer has.
_LARGEST_LAYER = 1 << 50
#: The image in the folder where it is made, its files, and the file that is made of them.
_LAYOUT, _TAG, _ROOT, _FILE = "image", "stage", "root", "image.sqsh"


class Imported(NamedTuple):
    """The path of a squashfs file, and how often a request to the registry was repeated."""

    path: str
    retries: int


def look_at_image(url: str, settings: RemoteSettings) -> Source:
    """Ask the registry which image ``url`` names now. Raise SourceError.

    Its size is that of its compressed layers, 0 if it has none for this machine.
    """
    registry = _Registry(url, settings)
    with doing(Kind.READ, url):
        manifest = registry.manifest(registry.name.reference)
        digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
        if child := _for_this_machine(url, manifest):
            manifest = registry.manifest(f"{registry.name.repository}@{child}")
    size = _layers_size(url, manifest)
    return Source(SourceFacts(size, 0, 0, 0, digest), _MODE, os.getegid(), size)


def import_image(
    url: str, digest: str, folder: str, settings: RemoteSettings, check: Callable[[], None]
) -> Imported:
    """Make a squashfs file of the image with this ``digest`` in the empty ``folder``.

    ``check`` is called now and then, and may end it by an error. Raise SourceError if the image
    cannot be pulled or unpacked, SpaceError if the disk is full.
    """
    _check_tools()
    registry = _Registry(url, settings, folder, check)
    with doing(Kind.READ, url):
        retries = registry.pull(digest)
    with doing(Kind.WRITE, url):
        image = f"{_LAYOUT}:{_TAG}"
        registry.run("umoci", "raw", "unpack", "--rootless", "--image", image, _ROOT)
        config = config_of(f"{folder}/{_LAYOUT}")
        remove_tree(f"{folder}/{_LAYOUT}")  # to have its room
        complete(f"{folder}/{_ROOT}", config)
        _pack(registry, config.created)
    return Imported(f"{folder}/{_FILE}", retries)


class _Registry:
    """Runs the programs for one image, in a ``folder``.

    The methods raise SourceError or SpaceError with what a program said.
    """

    def __init__(
        self,
        url: str,
        settings: RemoteSettings,
        folder: str = "/",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._url = url
        self._check = check
        self._settings = settings
        self.folder = folder
        self.name = ImageName.parse(url)
        self._verify = str(self.name.registry not in settings.insecure_registries).lower()
        self._environment = _environment(settings, folder)

    def manifest(self, reference: str) -> bytes:
        """Return a manifest as the registry has it, the bytes of which have the digest."""
        if not shutil.which("skopeo"):
            raise _missing(["skopeo"])
        argv = ("skopeo", "inspect", "--raw", f"--tls-verify={self._verify}", reference)
        patience = Patience(self._url, self._settings.patience, server="registry")
        return patience.keep(lambda _: self._ask(argv, self._settings.patience).output)

    def pull(self, digest: str) -> int:
        """Copy the image into `_LAYOUT`. Return how often that was tried again."""
        argv = (
            "skopeo", "copy", "--quiet", "--remove-signatures", f"--src-tls-verify={self._verify}",
            *_GZIP, f"{self.name.repository}@{digest}", f"oci:{_LAYOUT}:{_TAG}",
        )  # fmt: skip
        patience = Patience(self._url, self._settings.patience, server="registry")
        patience.keep(lambda _: self._ask(argv))  # layers that have come are not asked for again
        return patience.retries

    def _ask(self, argv: tuple[str, ...], limit: float = 0) -> Finished:
        try:
            done = run(argv, self._environment, self.folder, limit, self._check)
        except TimeoutError:
            raise RefusedError("the registry did not answer", may_pass=True) from None
        if done.code:
            self._check_space(done)
            raise _refusal(_said(done), self.name)
        return done

    def run(self, *argv: str) -> None:
        """Run a program that needs no registry."""
        done = run(argv, self._environment, self.folder, check=self._check)
        # mksquashfs writes an empty file in place of one that it cannot read, and ends with code 0.
        if done.code or "Failed to read" in done.errors:
            self._check_space(done)
            raise SourceError(
                f"{self._url}: {argv[0]} cannot make a file of this image ({_said(done)}); check "
                "the image, or tell the administrator"
            )

    def can_run(self, *argv: str) -> bool:
        """Return whether a program takes these arguments."""
        return not run(argv, self._environment, self.folder).code

    def _check_space(self, done: Finished) -> None:
        for number in (errno.ENOSPC, errno.EDQUOT):
            if os.strerror(number).lower() in done.errors.lower():
                raise as_stage_error(OSError(number, os.strerror(number)), self.folder)


def _environment(settings: RemoteSettings, folder: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    if kept.get(AUTH_FILE) and not os.access(kept[AUTH_FILE], os.R_OK):
        raise SourceError(
            "your file of credentials for registries cannot be read here; have "
            f"{AUTH_FILE} name a file that all nodes can read\n  {kept[AUTH_FILE]}"
        )
    environment = {"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **kept}
    if settings.ca_file:
        if not os.access(settings.ca_file, os.R_OK):
            raise SourceError(
                f"ca_file in [source] of stage.toml, {settings.ca_file}: it cannot be read; tell "
                "the administrator"
            )
        # Go, which the programs are written in, adds the system's own folders of certificates.
        environment["SSL_CERT_FILE"] = settings.ca_file
    if settings.proxy:
        environment.update(dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY"), settings.proxy))
    return environment


def _check_tools() -> None:
    missing = [name for name in _TOOLS if not shutil.which(name)]
    if missing:
        raise _missing(missing)


def _missing(names: list[str]) -> SourceError:
    packages = " ".join(_TOOLS[name] for name in names)
    verb = "is" if len(names) == 1 else "are"
    return SourceError(
        f"{' and '.join(names)} {verb} needed for images, but not installed on this node; tell the "
        f"administrator (packages: {packages})"
    )


def _said(done: Finished) -> str:
    """Return what a program said last, without what may be secret, and short."""
    found = _MESSAGE.findall(done.errors)
    lines = [line.strip() for line in done.errors.splitlines() if line.strip()]
    text = found[-1].replace('\\"', '"') if found else (lines or [f"code {done.code}"])[-1]
    text = printable(_QUERY.sub("?…", _BEGINNING.sub("", text, count=1)))
    return text if len(text) <= _MOST_SAID else f"…{text[-_MOST_SAID:]}"


class _Meaning(NamedTuple):
    """What it means if skopeo says one of ``signs``, in lower case."""

    signs: tuple[str, ...]
    text: str
    remedy: str = ""
    may_pass: bool = False


_MEANINGS = (
    _Meaning(
        ("manifest unknown", "name unknown", "repository name not known"),
        "no such image",
        "check the URL",
    ),
    _Meaning(
        ("unauthorized", "authentication required", "denied", "invalid username/password"),
        "you may not read it",
        "log in (skopeo login, docker login), and submit with the file of credentials where all "
        f"nodes can read it ({AUTH_FILE})",
    ),
    _Meaning(
        ("x509", "certificate"),
        "the registry's certificate is not valid for this name, or not trusted",
        "check the URL; if the site has a certificate authority of its own, tell the administrator "
        "to name it (ca_file in [source] of stage.toml)",
    ),
    _Meaning(
        ("http response to https client",),
        "the registry has no TLS",
        "ask the administrator (insecure_registries in [source] of stage.toml)",
    ),
    _Meaning(("no such host",), "its host is not known here", may_pass=True),
    _Meaning(
        (
            "connection refused", "connection reset", "closed idle connection", "timeout", "eof",
            "too many requests", "toomanyrequests", "network is unreachable", "no route to host",
            "status: 408", "status: 429", "status: 50", "status code 50",
        ),
        "the registry cannot be reached, or fails",
        may_pass=True,
    ),
)  # fmt: skip


def _refusal(said: str, image: ImageName) -> RefusedError:
    """Return the error for what skopeo ``said`` of the image, whose name may be a word of that."""
    text = said.lower()
    for reference in (f"{image.registry.lower()}/{image.name}", f"/v2/{image.name}/"):
        text = text.replace(reference, "")
    for signs, problem, remedy, may_pass in _MEANINGS:
        if any(sign in text for sign in signs):
            return RefusedError(f"{problem} (skopeo: {said})", remedy, may_pass=may_pass)
    return RefusedError(f"skopeo cannot read it ({said})", "check the URL and the image")


def _for_this_machine(url: str, manifest: bytes) -> str:
    """Return the digest of the image for this machine in a list of several, else nothing."""
    machine = os.uname().machine
    wanted = "linux", _ARCHITECTURES.get(machine, machine)

    def take(data: Any) -> str:
        for one in data.get("manifests") or []:
            platform = one.get("platform", {})
            if (platform.get("os"), platform.get("architecture")) == wanted:
                return _digest(one["digest"])
        return ""

    return _read(url, manifest, take)


def _layers_size(url: str, manifest: bytes) -> int:
    """Return the bytes of the layers; those of a list of images have none."""
    return _read(
        url, manifest, lambda data: sum(_size(one["size"]) for one in data.get("layers", ()))
    )


def _digest(text: Any) -> str:
    """Return a digest. Raise ValueError for anything else, TypeError for what is no text."""
    if not is_digest(text):
        raise ValueError("this is no digest")
    return str(text)


def _size(size: Any) -> int:
    """Return a number of bytes. Raise ValueError for anything else."""
    if type(size) is not int or not 0 <= size <= _LARGEST_LAYER:
        raise ValueError("this is no size")
    return size


def _read(url: str, manifest: bytes, take: Callable[[Any], T]) -> T:
    try:
        return take(json.loads(manifest))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise SourceError(f"{url}: its manifest cannot be read; check the image") from None


def _pack(registry: _Registry, created: int) -> None:
    """Pack `_ROOT` into `_FILE`. The same image becomes the same file where that is possible."""
    folder = registry.folder
    # What this version of mksquashfs can do is found by trying it with an empty folder.
    os.mkdir(f"{folder}/empty")
    options = ["-noappend", "-no-progress", "-quiet", "-all-root", "-no-xattrs"]
    for more in (("-mkfs-time", str(created)), _ZSTD):
        if registry.can_run("mksquashfs", "empty", "probe", *options, *more):
            options += more
    processors = str(len(os.sched_getaffinity(0)))
    registry.run("mksquashfs", _ROOT, _FILE, *options, "-processors", processors)
