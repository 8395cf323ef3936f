"""Find what opens the stores that a request reads."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stager.source.location import is_url

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stager.request.items import StageRequest


def with_stores(request: StageRequest) -> Mapping[str, str]:
    """Return this process's environment, with what opens the stores of the request's URLs."""
    urls = [item.source for item in request.items if is_url(item.source)]
    if not urls:
        return os.environ
    from stager.launch.credentials import with_credentials  # only for URLs

    return with_credentials(os.environ, urls)
