"""Which image in a registry does a URL name? Pure."""

from __future__ import annotations

import re
from typing import NamedTuple, Self

#: How the URL of an image begins.
_SCHEME = "docker://"
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


def from_enroot(uri: str) -> str:
    """Return the URL of the image that enroot and pyxis call ``uri``.

    Raise ValueError, which says what is wrong with it.

    >>> from_enroot("docker://nvcr.io#nvidia/cuda:12.4"), from_enroot("docker://ubuntu")
    ('docker://nvcr.io/nvidia/cuda:12.4', 'docker://docker.io/library/ubuntu')
    """
    if not uri.startswith(_SCHEME):
        raise ValueError(f"names no registry; write {_SCHEME}REGISTRY#NAME:TAG")
    registry, has_registry, name = uri.removeprefix(_SCHEME).rpartition("#")
    if "@" in registry:
        raise ValueError("has a user in it; leave it out and log in (skopeo login, docker login)")
    first, has_folder, _ = name.partition("/")
    if not has_registry and not (has_folder and is_registry(first)):
        registry, name = _DEFAULT_REGISTRY, name if has_folder else f"{_DEFAULT_FOLDER}/{name}"
    url = f"{_SCHEME}{registry}/{name}" if registry else uri
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
        registry, _, path = url.removeprefix(_SCHEME).partition("/")
        rest, at, digest = path.partition("@")
        name, colon, tag = rest.partition(":")
        if not (registry and name):
            raise ValueError(f"is not complete; write {_SCHEME}REGISTRY/NAME:TAG")
        if not is_registry(registry):
            raise ValueError(
                f"has no registry: {registry} is no host with a '.' or a port; write "
                f"{_SCHEME}REGISTRY/NAME:TAG, for instance with docker.io"
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
        return f"{_SCHEME}{self.registry}/{self.name}"

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
