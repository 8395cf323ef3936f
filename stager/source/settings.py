"""Define what a site sets for sources that are URLs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self


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
#: The variables in which a job's environment may name another endpoint than the vendor's, by
#: scheme.
ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "hf": ("HF_ENDPOINT",),
}
#: The vendors' domains of data, to which the library sends what opens a store if no other endpoint
#: is named. Anybody may have a place there.
VENDORS = {
    "s3": ("amazonaws.com", "amazonaws.com.cn"), "az": ("windows.net",), "gs": ("googleapis.com",),
}  # fmt: skip
#: Where the library asks for keys: the vendors' own servers, and the addresses of a machine's
#: identity.
KEEPERS = {
    "s3": ("sts.{region}.amazonaws.com", "169.254.0.0/16", "fd00:ec2::254"),
    "az": ("microsoftonline.com", "169.254.0.0/16"),
    "gs": (
        "accounts.google.com", "oauth2.googleapis.com", "metadata.google.internal",
        "169.254.0.0/16",
    ),
}  # fmt: skip
#: The variables that name others who are asked for keys.
ASKED_FOR_KEYS = ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AZURE_AUTHORITY_HOST")
#: The endpoint of hf:// if that variable is not set.
HUB = "https://huggingface.co"
#: The endpoint of gs:// likewise.
GOOGLE = "https://storage.googleapis.com"
DEFAULT_REMOTE = RemoteSettings()
