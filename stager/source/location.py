"""Read the name of a container image in a registry. Pure.

Read the URL of a source: in a store, on the web, on a hub of models, or an image. Pure.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple, Self

from stager.base.formats import without_version

#: The scheme of URLs that name an image.
SCHEME = "docker://"
#: What an image is if neither tag nor digest is written.
_DEFAULT_TAG = "latest"
#: Where enroot looks for an image without a registry, and for one without a folder there.
_DEFAULT_REGISTRY, _DEFAULT_FOLDER = "docker.io", "library"
#: The parts of a name as registries define them (opencontainers/distribution-spec). They are
#: compiled where they are used: all ranks import this module.
_REGISTRY = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?"
_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_NAME = rf"{_PART}(/{_PART})*"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_DIGEST = r"sha256:[0-9a-f]{64}"
#: Digits of a digest in the name of a file, which are enough to tell images apart.
_SHOWN = 12


def is_image(source: str) -> bool:
    """Return whether a source is the URL of an image."""
    return source.startswith(SCHEME)


def from_enroot(uri: str) -> str:
    """Return the URL of the image that enroot and pyxis call ``uri``.

    Raise ValueError, which says what is wrong with it.

    >>> from_enroot("docker://nvcr.io#nvidia/cuda:12.4"), from_enroot("docker://ubuntu")
    ('docker://nvcr.io/nvidia/cuda:12.4', 'docker://docker.io/library/ubuntu')
    """
    if not is_image(uri):
        raise ValueError(f"names no registry; write {SCHEME}REGISTRY#NAME:TAG")
    registry, has_registry, name = uri.removeprefix(SCHEME).rpartition("#")
    if "@" in registry:
        raise ValueError("has a user in it; leave it out and log in (skopeo login, docker login)")
    first, has_folder, _ = name.partition("/")
    if not has_registry and not (has_folder and is_registry(first)):
        registry, name = _DEFAULT_REGISTRY, name if has_folder else f"{_DEFAULT_FOLDER}/{name}"
    url = f"{SCHEME}{registry}/{name}" if registry else uri
    ImageName.parse(url)
    return url


def is_registry(text: str) -> bool:
    """Return whether ``text`` is a registry: a host, perhaps with a port.

    A name without a dot and a port is none: tools look for such an image at docker.io.

    >>> is_registry("docker.io"), is_registry("login:5000"), is_registry("library")
    (True, True, False)
    """
    is_host = "." in text or ":" in text or text == "localhost"
    return is_host and re.fullmatch(_REGISTRY, text) is not None


def is_digest(text: str) -> bool:
    """Return whether ``text`` is the digest of an image."""
    return re.fullmatch(_DIGEST, text) is not None


class ImageName(NamedTuple):
    """An image, ``name``, in a ``registry``; the ``digest`` is empty unless it was written."""

    registry: str
    name: str
    tag: str
    digest: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """Return the image that ``url`` names. Raise ValueError, which says what is wrong."""
        registry, _, path = url.removeprefix(SCHEME).partition("/")
        rest, at, digest = path.partition("@")
        name, colon, tag = rest.partition(":")
        if not (registry and name):
            raise ValueError(f"is not complete; write {SCHEME}REGISTRY/NAME:TAG")
        if not is_registry(registry):
            raise ValueError(
                f"has no registry: {registry} is no host with a '.' or a port; write "
                f"{SCHEME}REGISTRY/NAME:TAG, for instance with docker.io"
            )
        if not re.fullmatch(_NAME, name):
            raise ValueError(
                "has a name that is not valid: use only lower-case letters, digits and single "
                "'.', '_' or '-' between them"
            )
        if colon and not re.fullmatch(_TAG, tag):
            raise ValueError(
                "has a tag that is not valid: use only 1 to 128 letters, digits, '-', '_' and "
                "'.', a letter or digit first"
            )
        if at and not re.fullmatch(_DIGEST, digest):
            raise ValueError("has a digest that is not sha256: and 64 hexadecimal digits")
        return cls(registry, name, tag, digest)

    @property
    def repository(self) -> str:
        """The image without tag and digest, as skopeo takes it."""
        return f"{SCHEME}{self.registry}/{self.name}"

    @property
    def reference(self) -> str:
        """The image as it was asked for, as skopeo takes it: by digest if one was written."""
        if self.digest:
            return f"{self.repository}@{self.digest}"
        return f"{self.repository}:{self.tag or _DEFAULT_TAG}"

    def pinned(self, digest: str) -> str:
        """Return the URL of the image in this repository that has the ``digest``."""
        return f"{self.repository}@{digest}"

    @property
    def file_name(self) -> str:
        """The name of a file for the image, as enroot names it.

        >>> ImageName.parse("docker://nvcr.io/nvidia/cuda:12.4").file_name
        'nvidia+cuda+12.4.sqsh'
        """
        digits = self.digest.removeprefix("sha256:")[:_SHOWN]
        return "+".join(filter(None, (*self.name.split("/"), self.tag or digits))) + ".sqsh"


class Scheme(StrEnum):
    """The schemes of URLs that can be staged."""

    AZ = "az"
    S3 = "s3"
    GS = "gs"
    #: A model or a data set on a hub.
    HF = "hf"
    HTTPS = "https"
    #: Only where the site names it: nobody proves who answers.
    HTTP = "http"
    #: A container image in a registry; see `image_name`.
    DOCKER = "docker"

    @property
    def is_web(self) -> bool:
        """Whether it names a host, and not a store."""
        return self in (Scheme.HTTPS, Scheme.HTTP)


_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
#: What a URL of each kind looks like.
_SHAPES = {Scheme.AZ: "az://ACCOUNT/CONTAINER/PATH", Scheme.S3: "s3://BUCKET/KEY",
           Scheme.GS: "gs://BUCKET/KEY", Scheme.HF: "hf://ORG/MODEL[@REVISION]",
           Scheme.HTTPS: "https://HOST/PATH", Scheme.HTTP: "http://HOST/PATH",
           Scheme.DOCKER: "docker://REGISTRY/NAME:TAG"}  # fmt: skip
#: An account of Azure, a bucket or container, and a host with its port. The library makes a host of
#: each, so it must not contain what ends a host's name.
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
_CONTAINER = re.compile(r"[A-Za-z0-9$_][A-Za-z0-9._-]*")
_HOST = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:.]+\])"
    r"(:([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))?"
)
#: What a hub has besides models.
_HUB_KINDS = ("datasets",)
#: A name on a hub; a revision, as git lets it be; and the one that is meant if none is written.
_HUB_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/+-]*")
_NO_REVISION = re.compile(r"\.\.|//|/\.|/$")
_MAIN = "main"
#: A '%' that begins no code, and what needs none in the path of the web (RFC 3986).
_NO_CODE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_PLAIN = "/%!$&'()*+,;=:@~"
#: How what is secret is given.
_BY_ENVIRONMENT = "give credentials by the environment"
_BY_FILE = "write the URL into a file of your own with mode 600, and @/PATH/OF/FILE as source"
#: What is wrong with a part of a URL, and which characters may be in it.
_NOT_VALID = "that is not valid: use only"
_CHARACTERS = "letters, digits, '-', '_' and '.', a letter or digit first"


def is_endpoint(url: str) -> bool:
    """Return whether ``url`` is that of a server: a host, a port and a plain path, nothing else."""
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    is_plain = re.fullmatch(r"[A-Za-z0-9._~/-]*", path) is not None
    return scheme in ("https", "http") and is_plain and _HOST.fullmatch(host) is not None


def is_url(source: str) -> bool:
    """Return whether a source is a URL, and not a path: paths begin with a slash."""
    return _URL.match(source) is not None


def is_url_file(source: str) -> bool:
    """Return whether a source names a file that has the URL: one with a secret."""
    return source.startswith("@/")


class Location(NamedTuple):
    """One object, or all that lies beneath a folder: a URL that ends in a slash.

    ``account`` is that of az:// alone; ``container`` is a bucket, a host or a registry.
    ``path`` has no slash at its end. It is empty for a whole bucket. That of the web is as it was
    written, with its '%' codes.

    For hf:// the ``account`` is empty or ``datasets``, ``container`` is an organization or a user,
    empty for the oldest models, and ``path`` is the name of the model or data set.
    """

    scheme: Scheme
    account: str
    container: str
    path: str
    is_folder: bool = False
    #: A branch, tag or commit of hf://, or the version of an object that ``?versionId=`` names.
    revision: str = ""

    @property
    def above(self) -> str:
        """What the paths of all objects in the folder begin with."""
        return f"{self.path}/" if self.path else ""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Return what ``url`` names. Raise ValueError, which says what is wrong with it."""
        found = _URL.match(url)
        try:
            scheme = Scheme(found[1] if found else "")
        except ValueError:
            known = ", ".join(f"{one}://" for one in _SHAPES)
            raise ValueError(f"is a URL of an unknown kind; known: {known}") from None
        assert found
        if scheme is Scheme.DOCKER and "#" in url:
            raise ValueError(f"is written as for enroot; write {from_enroot(url)}")
        plain = without_version(url)
        if "?" in plain or "#" in plain:
            raise ValueError(
                "has a '?' or '#': what follows may be a secret, which others would see in the "
                f"job's description; {_BY_FILE if scheme.is_web else _BY_ENVIRONMENT}"
            )
        rest, version = plain[found.end() :], url[len(plain) :].partition("=")[2]
        if version and rest.endswith("/"):
            raise ValueError("names a version, which a folder does not have")
        if scheme is Scheme.HF:
            return cls._of_hub(rest)
        if scheme is Scheme.DOCKER:
            return cls._of_image(url)
        return cls._of_object(scheme, rest)._replace(revision=version)

    @classmethod
    def _of_image(cls, url: str) -> Self:
        container, _, path = url.partition("://")[2].partition("/")
        _check_no_user(container, Scheme.DOCKER)
        ImageName.parse(url)
        return cls(Scheme.DOCKER, "", container, path)

    @classmethod
    def _of_object(cls, scheme: Scheme, rest: str) -> Self:
        """Return what a URL of a store or a web server names, by what is behind its scheme."""
        account, is_folder = "", rest.endswith("/")
        if scheme is Scheme.AZ:
            account, _, rest = rest.partition("/")
        container, _, path = rest.partition("/")
        _check_no_user(container, scheme)
        if not container or not (path or is_folder) or (scheme is Scheme.AZ and not account):
            raise ValueError(f"is not complete; write {_SHAPES[scheme]}")
        if is_folder and scheme.is_web:
            raise ValueError("ends in '/', but a web server cannot be asked what lies beneath")
        path = path.removesuffix("/")
        if account and not _ACCOUNT.fullmatch(account):
            raise ValueError(f"has an account {_NOT_VALID} 3 to 24 lower-case letters and digits")
        if scheme.is_web and not _HOST.fullmatch(container):
            raise ValueError("has a host that is not valid: write HOST or HOST:PORT (1 to 65535)")
        if not scheme.is_web and not _CONTAINER.fullmatch(container):
            raise ValueError(f"has a name {_NOT_VALID} {_CHARACTERS}")
        plain = _unquoted(path) if scheme.is_web else path
        if plain and any(part in ("", ".", "..") for part in plain.split("/")):
            raise ValueError("has an empty part, '.' or '..' in its path")
        if not plain.isprintable():
            raise ValueError("has a character in its path that cannot be printed")
        return cls(scheme, account, container, path, is_folder)

    @property
    def web_url(self) -> str:
        """The URL as a web server is asked for it: as written, with codes for what needs some."""
        from urllib.parse import quote  # slow to import; all ranks import this module

        path = quote(_NO_CODE.sub("%25", self.path), safe=_PLAIN)
        return f"{self.scheme}://{self.container}/{path}"

    @classmethod
    def _of_hub(cls, rest: str) -> Self:
        """Return what ``[ORG/]MODEL[@REVISION]`` names, with ``datasets/`` before it or without."""
        name, at, revision = rest.partition("@")
        kind, parts = "", name.removesuffix("/").split("/")
        if parts[0] in _HUB_KINDS:
            kind = parts.pop(0)
        if len(parts) > 2:
            raise ValueError("names a file or folder of a model; stage the model, with include=")
        if not all(parts) or not parts or (at and not revision):
            raise ValueError(f"is not complete; write {_SHAPES[Scheme.HF]}")
        if not all(_HUB_NAME.fullmatch(part) for part in parts):
            raise ValueError(f"has a name {_NOT_VALID} {_CHARACTERS}")
        if at and (not _REVISION.fullmatch(revision) or _NO_REVISION.search(revision)):
            raise ValueError("has a revision that is not valid: write a branch, tag or commit")
        return cls(Scheme.HF, kind, "/".join(parts[:-1]), parts[-1], True, revision or _MAIN)


def _check_no_user(host: str, scheme: Scheme) -> None:
    if "@" in host and scheme.is_web:
        raise ValueError(f"has a user in it, whom others would see; use ~/.netrc, or {_BY_FILE}")
    if "@" in host:
        raise ValueError(f"has a user in it; {_BY_ENVIRONMENT}")


def name_of(url: str) -> str:
    """Return the last part of the path of a source, which may be no URL.

    >>> name_of("hf://org/model@refs/pr/1"), name_of("/shared/set/"), name_of("https://host/a%20b")
    ('model', 'set', 'a b')
    >>> name_of("s3://bucket/set.tar?versionId=3")
    'set.tar'
    """
    name = without_revision(url).rstrip("/").rpartition("/")[2]
    if not url.startswith((f"{Scheme.HTTPS}://", f"{Scheme.HTTP}://")):
        return name
    try:
        plain = _unquoted(name)
    except ValueError:
        return name
    return plain if plain.isprintable() and "/" not in plain else name


def cache_name(url: str) -> str:
    """Return what the folder of a model, or of a data set, is called in the hub's own cache.

    >>> cache_name("hf://org/model@main"), cache_name("hf://datasets/org/set")
    ('models--org--model', 'datasets--org--set')
    >>> cache_name("hf://gpt2")
    'models--gpt2'
    """
    kind, organization, name = Location.parse(url)[1:4]
    return "--".join(filter(None, (kind or "models", organization, name)))


def without_revision(url: str) -> str:
    """Return the URL, or path, without the revision of hf://, or version of an object."""
    return url.partition("@")[0] if url.startswith(f"{Scheme.HF}://") else without_version(url)


def _unquoted(path: str) -> str:
    from urllib.parse import unquote  # slow to import; all ranks import this module

    try:
        return unquote(path, errors="strict")
    except UnicodeDecodeError:
        raise ValueError("has '%' codes in its path that are not UTF-8") from None
