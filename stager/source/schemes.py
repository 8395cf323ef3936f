"""What kind of source is a path or URL, what is known of that kind, and what does the URL name?

`Scheme` is the registry of all kinds. Pure.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple, Self

from stager.base.formats import without_version
from stager.source.endpoints import AUTH_FILE, URL_SECRETS
from stager.source.image_name import ImageName, from_enroot

#: A URL: paths begin with a slash.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
#: What the vendors' own tools read of credentials.
_AWS = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION",
    "AWS_DEFAULT_REGION", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN", "AWS_ROLE_SESSION_NAME",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
    "AWS_SKIP_SIGNATURE", "AWS_REQUEST_PAYER",
)  # fmt: skip
_AZURE = (
    "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN", "AZURE_STORAGE_CLIENT_ID", "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_STORAGE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID",
    "AZURE_FEDERATED_TOKEN_FILE", "AZURE_AUTHORITY_HOST", "AZURE_SKIP_SIGNATURE",
)  # fmt: skip
_GOOGLE = (
    "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_SKIP_SIGNATURE",
)  # fmt: skip


class Scheme(StrEnum):
    """The kinds of sources, each with what stands before ``://`` in its URLs.

    A new kind is a row here and a case in `access`; where its credentials are found: see
    `launch.credentials`.
    """

    #: What a URL looks like; empty for what is none, or none that can be staged.
    shape: str
    #: For users: what it names, and what opens it besides variables; empty if that is said of the
    #: kind before. See `launch.credentials`.
    meaning: str
    opener: str
    #: The variables of a job's environment that open it, and those that may name another endpoint
    #: than the vendor's.
    credentials: tuple[str, ...]
    endpoints: tuple[str, ...]
    #: The vendor's domains of data, to which the library sends what opens a store if no other
    #: endpoint is named. Anybody may have a place there.
    vendors: tuple[str, ...]
    #: Where the library asks for keys: the vendor's own servers, and the addresses of a machine's
    #: identity.
    keepers: tuple[str, ...]

    def __new__(
        cls,
        name: str,
        shape: str,
        meaning: str = "",
        opener: str = "",
        credentials: tuple[str, ...] = (),
        endpoints: tuple[str, ...] = (),
        vendors: tuple[str, ...] = (),
        keepers: tuple[str, ...] = (),
    ) -> Self:
        """Make a member; the arguments are the fields."""
        self = str.__new__(cls, name)
        self._value_ = name
        self.shape, self.meaning, self.opener = shape, meaning, opener
        self.credentials, self.endpoints = credentials, endpoints
        self.vendors, self.keepers = vendors, keepers
        return self

    AZ = (
        "az", "az://ACCOUNT/CONTAINER/PATH", "an object of Azure's blobs",
        (
            "else `AZURE_STORAGE_KEY` or `AZURE_STORAGE_CONNECTION_STRING`, else the identity of "
            "the machine"
        ),
        _AZURE, ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
        ("windows.net",), ("microsoftonline.com", "169.254.0.0/16"),
    )  # fmt: skip
    S3 = (
        "s3", "s3://BUCKET/KEY", "an object of S3, also with `?versionId=ID`",
        "else the profile that `AWS_PROFILE` names, in `~/.aws`, else the identity of the machine",
        _AWS, ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
        ("amazonaws.com", "amazonaws.com.cn"),
        ("sts.{region}.amazonaws.com", "169.254.0.0/16", "fd00:ec2::254"),
    )  # fmt: skip
    GS = (
        "gs", "gs://BUCKET/KEY", "an object of Google's storage",
        "else the file in `~/.config/gcloud`, else the identity of the machine",
        _GOOGLE, ("GOOGLE_BASE_URL",),
        ("googleapis.com",),
        (
            "accounts.google.com", "oauth2.googleapis.com", "metadata.google.internal",
            "169.254.0.0/16",
        ),
    )  # fmt: skip
    HF = (
        "hf", "hf://ORG/MODEL[@REVISION]",
        (
            "a model of the Hugging Face Hub, or with `datasets/` before ORG a data set; REVISION "
            "is a branch, tag or commit, else `main`"
        ),
        "else the token of a login, in `~/.cache/huggingface`",
        ("HF_TOKEN",), ("HF_ENDPOINT",),
    )  # fmt: skip
    HTTPS = (
        "https", "https://HOST/PATH",
        "a file of a web server; one with a secret is in a file of mode 600, `@/FILE`",
        "the URL in `@/FILE`, else `~/.netrc`",
        (URL_SECRETS,),
    )  # fmt: skip
    HTTP = (
        "http", "http://HOST/PATH",
        "the same, where the site names it", "",
        (URL_SECRETS,),
    )  # fmt: skip
    #: See `image_name`.
    DOCKER = (
        "docker", "docker://REGISTRY/NAME:TAG",
        "a container image, also by `@sha256:DIGEST`; it becomes a squashfs file",
        (
            "else `$XDG_RUNTIME_DIR/containers/auth.json`, `~/.config/containers/auth.json` or "
            "`~/.docker/config.json`"
        ),
        (AUTH_FILE,),
    )  # fmt: skip
    #: A file or folder on a filesystem that the nodes mount.
    PATH = "", ""
    #: A URL that cannot be staged.
    UNKNOWN = "?", ""

    @classmethod
    def of(cls, source: str) -> Scheme:
        """Return the scheme of a path, or of a URL.

        >>> Scheme.of("s3://bucket/key").name, Scheme.of("/shared/set").name, Scheme.of("ftp://h/a").name
        ('S3', 'PATH', 'UNKNOWN')
        """
        found = _URL.match(source)
        return next(
            (one for one in URLS if found and one == found[1]), cls.UNKNOWN if found else cls.PATH
        )

    @property
    def is_url(self) -> bool:
        """Whether it is no path: only those who know the scheme can look at the source."""
        return self is not Scheme.PATH

    @property
    def is_web(self) -> bool:
        """Whether it names a host, and not a store."""
        return self in (Scheme.HTTPS, Scheme.HTTP)

    @property
    def is_made(self) -> bool:
        """Whether one node makes the file that all get, with a size that is not known before."""
        return self is Scheme.DOCKER

    @property
    def by_requests(self) -> bool:
        """Whether its bytes are asked for by requests, several of which are under way at once."""
        return self.is_url and not self.is_made


#: All that can be staged but paths.
URLS = tuple(one for one in Scheme if one.shape)
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
        scheme = Scheme.of(url)
        if scheme not in URLS:
            known = ", ".join(f"{one}://" for one in URLS)
            raise ValueError(f"is a URL of an unknown kind; known: {known}")
        if scheme is Scheme.DOCKER and "#" in url:
            raise ValueError(f"is written as for enroot; write {from_enroot(url)}")
        plain = without_version(url)
        if "?" in plain or "#" in plain:
            raise ValueError(
                "has a '?' or '#': what follows may be a secret, which others would see in the "
                f"job's description; {_BY_FILE if scheme.is_web else _BY_ENVIRONMENT}"
            )
        rest, version = plain.partition("://")[2], url[len(plain) :].partition("=")[2]
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
            raise ValueError(f"is not complete; write {scheme.shape}")
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
            raise ValueError(f"is not complete; write {Scheme.HF.shape}")
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
    >>> name_of("s3://bucket/set.tar?versionId=3"), name_of("docker://nvcr.io/nvidia/cuda:12.4")
    ('set.tar', 'nvidia+cuda+12.4.sqsh')
    """
    scheme = Scheme.of(url)
    if scheme.is_made:
        return ImageName.parse(url).file_name
    name = without_revision(url).rstrip("/").rpartition("/")[2]
    if not scheme.is_web:
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
    return url.partition("@")[0] if Scheme.of(url) is Scheme.HF else without_version(url)


def _unquoted(path: str) -> str:
    from urllib.parse import unquote  # slow to import; all ranks import this module

    try:
        return unquote(path, errors="strict")
    except UnicodeDecodeError:
        raise ValueError("has '%' codes in its path that are not UTF-8") from None
