"""The cluster that all tests of this folder use; each test begins with empty disks.

Each test ends with a check that the cluster is healthy and that the test left nothing there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster.site import Site, remove_all

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def _one_installation(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have all clusters of this run, those of other workers too, share one installation."""
    Site.installed = tmp_path_factory.getbasetemp().parent / "installed"


@pytest.fixture(scope="session")
def installed_site() -> Iterator[Site]:
    """Start a cluster of four nodes with slurm-stage, for the whole run."""
    with Site() as cluster:
        cluster.make_image()
        yield cluster


@pytest.fixture(scope="module")
def tidied_site(installed_site: Site) -> Iterator[Site]:
    """Return the cluster; remove from shared storage what the tests of a file left there."""
    shared = installed_site.path("login", "/shared")
    before = set(shared.iterdir())
    yield installed_site
    remove_all(set(shared.iterdir()) - before)


@pytest.fixture
def site(tidied_site: Site) -> Iterator[Site]:
    """Return the cluster with empty disks; check afterwards that nothing is left or drained.

    A test that leaves something fails alone: it is taken away.
    """
    tidied_site.empty_disks()
    yield tidied_site
    left = tidied_site.left_behind()
    try:
        if left:
            tidied_site.take_away()
    finally:
        assert left == []


@pytest.fixture
def _task_prolog(site: Site) -> Iterator[None]:
    """The site without the plugin: TaskProlog and Prolog in slurm.conf instead."""
    with site.without_plugin():
        yield
