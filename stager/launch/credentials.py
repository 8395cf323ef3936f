"""What opens the stores of a request: secrets of URLs, and credentials as vendors keep them.

A source ``@FILE`` is a URL in a file of the user's own, so no option, argument list or job's
description has its secret. Other credentials are found where the vendors' tools look: in the
environment, then in files. All files are read by the user's own process on the first node, and
what is found reaches the ranks by their environment (`launch.environment`).
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from stager.base.errors import SourceError, UsageError
from stager.fs.files import opened
from stager.request.grammar import misfit
from stager.source.endpoints import AUTH_FILE, URL_SECRETS, Secret, as_text, secrets_of
from stager.source.schemes import Location, Scheme, is_url_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping

    from stager.request.grammar import Directive
    from stager.request.items import StageRequest

#: The parts of a URL: what is before the user, the user, the rest without a query, and the query.
_PARTS = re.compile(r"(https?://)(?:([^/?#]*)@)?([^?#]*)(?:\?([^#]*))?(?:#.*)?")
#: What can be a URL, and the most bytes of a file.
_PRINTING = re.compile(r"[!-~]+")
_LONGEST = 16 << 10


#: What is said of a file that is not `is_private`.
NOT_PRIVATE = "others may use it; have it your own, by chmod 600"


def is_private(facts: os.stat_result) -> bool:
    """Whether nobody but this user may use a file, whose stat that is."""
    return facts.st_uid == os.geteuid() and not facts.st_mode & 0o077


class UnseenError(SourceError):
    """The file of a URL is not seen from this node, or its filesystem gives no answer."""


def content(path: str) -> str:
    """Return the text of a file that the user alone can read. Raise SourceError, OSError."""
    with opened(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) as descriptor:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise SourceError(f"{path}: it is no file; write the URL into one")
        if not is_private(facts):
            raise SourceError(f"{path}: {NOT_PRIVATE}")
        return os.read(descriptor, _LONGEST).decode("ascii", "replace")


def read_url_files(
    directives: Iterable[Directive],
    environment: MutableMapping[str, str],
    read_content: Callable[[str], str] = content,
) -> list[Directive]:
    """Return the directives with URLs in place of files; add their secrets to `environment`.

    ``read_content`` reads a file as `content`. Raise SourceError for one that cannot be used, its
    UnseenError if that is not known; UsageError for two with the same URL but another secret, or if
    a directive's options do not fit the URL.
    """
    secrets = secrets_of(environment)
    read: list[Directive] = []
    for directive in directives:
        if not is_url_file(directive.source):
            read.append(directive)
            continue
        path = directive.source[1:]
        try:
            url, secret = _parsed(path, read_content(path))
        except OSError as error:
            remedy = "check the path, and that this node mounts its filesystem"
            raise UnseenError(f"{path}: {error.strerror}; {remedy}") from None
        if secrets.setdefault(url, secret) != secret:
            raise UsageError(
                f"{path}: another file has {url} with another query or user; stage one of them in "
                "another job"
            )
        if problem := misfit(url, directive.options):
            raise UsageError(f"{url}: {problem}")
        read.append(replace(directive, source=url))
    if secrets:
        environment[URL_SECRETS] = as_text(secrets)
    return read


def _parsed(path: str, text: str) -> tuple[str, Secret]:
    """Return the URL in a file's text without what is secret, and that. No message repeats it."""
    line = text.removesuffix("\n").removesuffix("\r")
    found = _PARTS.fullmatch(line) if _PRINTING.fullmatch(line) else None
    if not found:
        raise SourceError(f"{path}: it has no URL; write one https://HOST/PATH, on one line alone")
    scheme, user, rest, query = found.groups()
    url = f"{scheme}{rest}"
    try:
        Location.parse(url)
    except ValueError as error:
        raise SourceError(f"{path}: its URL {error}") from None
    return url, Secret(unquote(user or "", errors="surrogateescape"), query or "")


#: The keys of a profile, and the variables that say the same.
_AWS = {
    "aws_access_key_id": "AWS_ACCESS_KEY_ID",
    "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "aws_session_token": "AWS_SESSION_TOKEN",
    "region": "AWS_REGION",
    "endpoint_url": "AWS_ENDPOINT_URL",
}
#: With one of these in the environment, no profile is asked for a key.
_AWS_GIVEN = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
#: Keys of profiles by which the vendor's tool asks somebody else for a key.
_AWS_ELSEWHERE = ("credential_process", "sso_session", "sso_start_url", "role_arn")
_GOOGLE_GIVEN = (
    "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_SKIP_SIGNATURE",
)  # fmt: skip
#: The parts of Azure's connection strings, and the variables that say the same.
_AZURE = {
    "AccountKey": "AZURE_STORAGE_ACCOUNT_KEY",
    "SharedAccessSignature": "AZURE_STORAGE_SAS_TOKEN",
    "BlobEndpoint": "AZURE_STORAGE_ENDPOINT",
}


def with_credentials(environment: Mapping[str, str], sources: Iterable[str]) -> dict[str, str]:
    """Return the ``environment``, and in it what files say of the stores of ``sources``.

    What is set there already stays as it is. Raise UsageError if a profile is missing, or is of a
    kind that only the vendor's tool can use; the first line of its message, which others may see,
    has nothing of the environment.
    """
    schemes = {Scheme.of(source) for source in sources}
    found: dict[str, str] = {}
    for scheme, read in (
        (Scheme.S3, _from_aws), (Scheme.GS, _from_google), (Scheme.AZ, _from_azure),
        (Scheme.HF, _from_hub), (Scheme.DOCKER, _from_registries),
    ):  # fmt: skip
        if scheme in schemes:
            found |= read(environment)
    if Scheme.HTTPS in schemes:
        return {**found, **environment, **_from_netrc(environment, sources)}
    return {**found, **environment}


def _home(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("HOME") or "/nonexistent")


def _from_aws(environment: Mapping[str, str]) -> dict[str, str]:
    name = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or "default"
    folder = _home(environment) / ".aws"
    secrets = environment.get("AWS_SHARED_CREDENTIALS_FILE") or str(folder / "credentials")
    config = environment.get("AWS_CONFIG_FILE") or str(folder / "config")
    section = name if name == "default" else f"profile {name}"
    profile = {**_section(config, section), **_section(secrets, name)}
    if not profile and name != "default":
        raise UsageError(
            "the profile that AWS_PROFILE names is in no file of profiles; correct one of them\n"
            f"  {name} is neither in {secrets} nor in {config}"
        )
    found = {_AWS[key]: value for key, value in profile.items() if key in _AWS}
    if environment.get("AWS_DEFAULT_REGION"):
        found.pop("AWS_REGION", None)  # the library would take it before the other
    if any(environment.get(name) for name in _AWS_GIVEN):
        return {name: found[name] for name in ("AWS_REGION", "AWS_ENDPOINT_URL") if name in found}
    elsewhere = [key for key in _AWS_ELSEWHERE if key in profile]
    if elsewhere and "AWS_ACCESS_KEY_ID" not in found:
        raise UsageError(
            f"your AWS profile takes its key from elsewhere ({elsewhere[0]}); put the key into the "
            "environment before you submit: "
            f'eval "$(aws configure export-credentials --format env)"\n  {name}'
        )
    return found


def _section(path: str, name: str) -> dict[str, str]:
    """Return one section of a file of the AWS tools; empty if there is none."""
    from configparser import ConfigParser, Error  # few stages are from a store

    parser = ConfigParser(interpolation=None, strict=False, default_section="")
    try:
        parser.read_string(Path(path).expanduser().read_text(encoding="utf-8"), path)
    except OSError:
        return {}
    except (Error, ValueError, RuntimeError):
        # Not what is wrong with it: the line may be a secret.
        raise UsageError(
            f"your file of AWS profiles cannot be read: it is not valid; correct it\n  {path}"
        ) from None
    return dict(parser[name]) if parser.has_section(name) else {}


def _from_google(environment: Mapping[str, str]) -> dict[str, str]:
    if any(environment.get(name) for name in _GOOGLE_GIVEN):
        return {}
    folder = environment.get("CLOUDSDK_CONFIG") or str(_home(environment) / ".config/gcloud")
    path = Path(folder) / "application_default_credentials.json"
    return {"GOOGLE_APPLICATION_CREDENTIALS": str(path)} if path.is_file() else {}


def _from_azure(environment: Mapping[str, str]) -> dict[str, str]:
    parts = environment.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";")
    pairs = dict(part.partition("=")[::2] for part in parts)
    found = {variable: pairs[part] for part, variable in _AZURE.items() if pairs.get(part)}
    if key := environment.get("AZURE_STORAGE_KEY"):
        found["AZURE_STORAGE_ACCOUNT_KEY"] = key
    return found


def _from_hub(environment: Mapping[str, str]) -> dict[str, str]:
    cache = environment.get("XDG_CACHE_HOME") or str(_home(environment) / ".cache")
    folder = environment.get("HF_HOME") or f"{cache}/huggingface"
    path = Path(environment.get("HF_TOKEN_PATH") or f"{folder}/token")
    try:
        token = path.expanduser().read_text(encoding="ascii").strip()
    except (OSError, ValueError, RuntimeError):  # the last, if a home is not known
        return {}
    return {"HF_TOKEN": token} if token else {}


def _from_registries(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the path of the file alone: what is in it is read by skopeo."""
    found = next(filter(os.path.isfile, _auth_files(environment)), None)
    return {AUTH_FILE: found} if found else {}


def _from_netrc(environment: Mapping[str, str], sources: Iterable[str]) -> dict[str, str]:
    """Return the variable of URLs' secrets, with users and passwords of hosts in ``~/.netrc``."""
    secrets = secrets_of(environment)
    for url in sources:
        known = secrets.get(url, Secret())
        if Scheme.of(url) is Scheme.HTTPS and not known.user:
            host = Location.parse(url).container
            if user := _user_at(host, str(_home(environment) / ".netrc")):
                secrets[url] = known._replace(user=user)
    return {URL_SECRETS: as_text(secrets)} if secrets else {}


def _user_at(host: str, path: str) -> str:
    """Return ``USER:PASSWORD`` for a host, or nothing. Raise UsageError if others may read it."""
    from netrc import NetrcParseError, netrc  # few stages are from the web

    try:
        machines = {name.lower(): login for name, login in netrc(path).hosts.items()}
        facts = os.stat(path)
    except (OSError, NetrcParseError, ValueError):  # as if it did not name the host
        return ""
    host = host.lower()
    found = machines.get(host) or machines.get(host.partition(":")[0])
    if not found:
        return ""
    if not is_private(facts):
        raise UsageError(f"your ~/.netrc: {NOT_PRIVATE}\n  {path}")
    return f"{found[0]}:{found[2]}"


def _auth_files(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield where the file may be, in the order of containers-auth.json(5)."""
    home = environment.get("HOME", "")
    for variable, folder, name in (
        ("XDG_RUNTIME_DIR", "", "containers/auth.json"),
        ("XDG_CONFIG_HOME", home and f"{home}/.config", "containers/auth.json"),
        ("DOCKER_CONFIG", home and f"{home}/.docker", "config.json"),
    ):
        above = environment.get(variable) or folder
        if above.startswith("/"):
            yield f"{above}/{name}"


def with_stores(request: StageRequest) -> Mapping[str, str]:
    """Return this process's environment, with what opens the stores of the request's URLs."""
    urls = [item.source for item in request.items if item.scheme.is_url]
    if not urls:
        return os.environ

    return with_credentials(os.environ, urls)
