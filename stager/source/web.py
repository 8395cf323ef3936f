"""Hold what is secret in URLs of the web apart from the URLs, which are shown and recorded.

It reaches the ranks by their environment, as other credentials do.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from stager.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

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
