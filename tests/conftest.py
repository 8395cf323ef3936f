"""Mark tests by what they need, and report how many ran on the real cluster."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parent

# The duration of an example depends more on the machine than on the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/mpi to tests/test_mpi.py, which runs it under mpiexec."""
    if collection_path == TESTS / "mpi" and not config.getoption("--in-mpi"):
        return True
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option by which tests/test_mpi.py starts pytest on each rank."""
    parser.addoption("--in-mpi", action="store_true", help="this pytest is a rank of an MPI world")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give each run a temporary folder of its own: of pytest's, a later run removes the oldest."""
    if config.option.basetemp is None:
        folder = tempfile.mkdtemp(prefix="slurm-stage-tests-")
        config.option.basetemp = f"{folder}/run"
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the real cluster, and those that start MPI worlds, which begin."""
    for item in items:
        if (TESTS / "cluster") in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.root)
        if item.path == TESTS / "test_mpi.py":
            item.add_marker(pytest.mark.mpi)
    # No other file takes as long: of two workers, one would end minutes after the other.
    items.sort(key=lambda item: item.get_closest_marker("mpi") is None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report how many tests ran on the real cluster."""
    passed = [report for report in terminalreporter.getreports("passed") if report.when == "call"]
    on_cluster = [report for report in passed if report.nodeid.startswith("tests/cluster/")]
    terminalreporter.write_line(
        f"{len(on_cluster)} of these {len(passed)} tests ran on the real Slurm cluster"
    )


@pytest.fixture(scope="session", autouse=True)
def _plain_mask() -> Iterator[None]:
    """Set a umask with which the users of the tests can read the tests' files."""
    import os

    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """Return a folder that everybody may enter; pytest makes it for its owner alone.

    A copy of what lies in a closed folder would be closed, too.
    """
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if folder.stat().st_mode & 0o005 == 0o005:
            break
        folder.chmod(0o755)
    return tmp_path
