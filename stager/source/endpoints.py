"""What does a site set for sources that are URLs, and where is what is secret in a URL?

The site's settings travel in the request. A secret stands apart from its URL, which is shown and
recorded, and reaches the ranks by their environment, as other credentials do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self

from stager.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """How objects are read. It travels to the ranks in the request."""

    #: Requests that each reading rank has under way at once.
    requests: int = 8
    #: Seconds for which a request is repeated while the store fails.
    patience: float = 60.0
    #: A file with certificates of the site's own authorities, and a proxy; empty for none.
    ca_file: str = ""
    proxy: str = ""
    #: Whether stores may be spoken to without TLS, because the site names such a one.
    allow_http: bool = False
    #: Registries that may be spoken to without TLS, or with a certificate that nobody checks.
    insecure_registries: tuple[str, ...] = ()
    #: Bytes a second that the whole job may read; 0 for no limit. `shared_by` makes it a rank's.
    limit: int = 0

    def shared_by(self, readers: int) -> Self:
        """Return the settings of one of ``readers`` ranks that read at once."""
        return replace(self, limit=-(-self.limit // readers))


#: The variable that names the file of credentials for registries (containers-auth.json).
AUTH_FILE = "REGISTRY_AUTH_FILE"
#: The variables that name others who are asked for keys.
ASKED_FOR_KEYS = ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AZURE_AUTHORITY_HOST")
#: The endpoint of hf:// if that variable is not set.
HUB = "https://huggingface.co"
#: The endpoint of gs:// likewise.
GOOGLE = "https://storage.googleapis.com"
DEFAULT_REMOTE = RemoteSettings()

#: The variable that has the secrets of all URLs of a stage.
URL_SECRETS = "STAGE_URL_SECRETS"
#: The most bytes of its value: the kernel takes 128 KiB with the name (MAX_ARG_STRLEN).
_MOST = 127 * 1024


class Secret(NamedTuple):
    """What a request for a URL has besides: ``USER:PASSWORD``, and the query as it is written.

    A byte of the former that is no UTF-8 is as Python decodes it (PEP 383).
    """

    user: str = ""
    query: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the request."""
        if not self.user:
            return {}
        from base64 import b64encode  # rarely needed

        user = self.user.encode(errors="surrogateescape")
        return {"Authorization": f"Basic {b64encode(user).decode()}"}


def secrets_of(environment: Mapping[str, str]) -> dict[str, Secret]:
    """Return the secrets by URL."""
    found = json.loads(environment.get(URL_SECRETS) or "{}")
    return {url: Secret(*secret) for url, secret in found.items()}


def as_text(secrets: Mapping[str, Secret]) -> str:
    """Return the value of the variable. Raise UsageError if the kernel does not take it."""
    text = json.dumps(secrets)
    if len(text) > _MOST:
        raise UsageError(
            "the sources of this job that are URLs with a secret are too long for the environment "
            f"of the ranks ({len(text)} bytes of at most {_MOST}); stage fewer of them in one job"
        )
    return text
