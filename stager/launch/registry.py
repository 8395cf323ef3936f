"""Find the user's credentials for registries, where skopeo, podman and docker keep them.

Ranks have another HOME, so they are told the file; what is in it is read by skopeo alone.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stager.source.image_name import is_image
from stager.source.settings import AUTH_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stager.request.items import StageRequest


def with_credentials(environment: Mapping[str, str], request: StageRequest) -> Mapping[str, str]:
    """Return the environment with `AUTH_FILE` if an image is staged and there is such a file."""
    if AUTH_FILE in environment or not any(is_image(item.source) for item in request.items):
        return environment
    found = next(filter(os.path.isfile, _places(environment)), None)
    return {**environment, AUTH_FILE: found} if found else environment


def _places(environment: Mapping[str, str]) -> Iterator[str]:
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
