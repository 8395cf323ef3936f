"""Find a user's credentials for stores where the vendors' tools look: the environment, then files.

The files are read by the user's own process on the first node. What is found reaches the ranks by
their environment; see `environment`.
"""

from __future__ import annotations

import os
from configparser import ConfigParser, Error
from pathlib import Path
from typing import TYPE_CHECKING

from stager.base.errors import UsageError
from stager.launch.url_file import NOT_PRIVATE, is_private
from stager.source.location import Location, Scheme, is_url
from stager.source.settings import AUTH_FILE
from stager.source.web import URL_SECRETS, Secret, as_text, secrets_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

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
    sources = [source for source in sources if is_url(source)]
    schemes = {Location.parse(source).scheme for source in sources}
    found: dict[str, str] = {}
    if Scheme.S3 in schemes:
        found |= _from_aws(environment)
    if Scheme.GS in schemes:
        found |= _from_google(environment)
    if Scheme.AZ in schemes:
        found |= _from_azure(environment)
    if Scheme.HF in schemes:
        found |= _from_hub(environment)
    if Scheme.DOCKER in schemes:
        found |= _from_registries(environment)
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
        if url.startswith(f"{Scheme.HTTPS}://") and not known.user:
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
