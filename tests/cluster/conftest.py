"""The site that all tests of this folder use; each begins with empty disks.

No test is over until the cluster is as healthy as before, and nothing of the test is left on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster.site import Site

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def installed_site() -> Iterator[Site]:
    """A cluster of four nodes with slurm-stage, for the whole run."""
    with Site() as cluster:
        cluster.make_image()
        yield cluster


@pytest.fixture
def site(installed_site: Site) -> Iterator[Site]:
    """The cluster with empty disks; afterwards nothing may be left behind, no node drained."""
    installed_site.empty_disks()
    yield installed_site
    installed_site.assert_healthy()
    assert installed_site.leftovers() == []
