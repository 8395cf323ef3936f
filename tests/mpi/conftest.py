"""Every test here runs on all ranks at once; in a world of two, on COMM_SELF too."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mpi4py import MPI

if TYPE_CHECKING:
    from collections.abc import Iterator


# A rank by itself does the same in a larger world, only slower.
@pytest.fixture(params=["SELF", "WORLD"] if MPI.COMM_WORLD.size == 2 else ["WORLD"])
def comm(request: pytest.FixtureRequest) -> MPI.Intracomm:
    """The communicator of the ranks that work together."""
    return MPI.COMM_SELF if request.param == "SELF" else MPI.COMM_WORLD


@pytest.fixture
def folder(comm: MPI.Intracomm) -> Iterator[Path]:
    """One scratch folder that all ranks of ``comm`` share."""
    path = Path(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else ""))
    path.chmod(0o755)  # a copy of what lies in a closed folder would be closed, too
    yield path
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(path)
