"""Read the URL of a source: an object in a store, or a file on the web. Pure."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple, Self


class Scheme(StrEnum):
    """The schemes of URLs that can be staged."""

    AZ = "az"
    S3 = "s3"
    GS = "gs"
    HTTPS = "https"
    #: Only where the site names it: nobody proves who answers.
    HTTP = "http"

    @property
    def is_web(self) -> bool:
        """Whether it names a host, and not a store."""
        return self in (Scheme.HTTPS, Scheme.HTTP)


_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
#: What a URL of each kind looks like.
_SHAPES = {Scheme.AZ: "az://ACCOUNT/CONTAINER/PATH", Scheme.S3: "s3://BUCKET/KEY",
           Scheme.GS: "gs://BUCKET/KEY", Scheme.HTTPS: "https://HOST/PATH",
           Scheme.HTTP: "http://HOST/PATH"}  # fmt: skip


def is_url(source: str) -> bool:
    """Return whether a source is a URL, and not a path: paths begin with a slash."""
    return _URL.match(source) is not None


class Location(NamedTuple):
    """One object, or all that lies beneath a folder: a URL that ends in a slash.

    ``account`` is that of az:// alone; ``container`` is a bucket or a host. ``path`` has no slash
    at its end. It is empty for a whole bucket.
    """

    scheme: Scheme
    account: str
    container: str
    path: str
    is_folder: bool = False

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
        if "?" in url or "#" in url:
            raise ValueError(
                "has a '?' or '#': what follows may be a secret, which others would see in the "
                "job's description; give credentials by the environment"
            )
        account, rest = "", url[found.end() :]
        if scheme is Scheme.AZ:
            account, _, rest = rest.partition("/")
        container, _, path = rest.partition("/")
        if "@" in container:
            raise ValueError("has a user in it; give credentials by the environment")
        is_folder = url.endswith("/")
        if not container or not (path or is_folder) or (scheme is Scheme.AZ and not account):
            raise ValueError(f"is not complete; write {_SHAPES[scheme]}")
        if is_folder and scheme.is_web:
            raise ValueError("ends in '/', but a web server cannot be asked what lies beneath")
        path = path.removesuffix("/")
        if path and any(part in ("", ".", "..") for part in path.split("/")):
            raise ValueError("has an empty part, '.' or '..' in its path")
        path = _unquoted(path) if scheme.is_web else path
        return cls(scheme, account, container, path, is_folder)


def _unquoted(path: str) -> str:
    from urllib.parse import unquote  # slow to import; all ranks import this module

    return unquote(path)
