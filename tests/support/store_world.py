"""Nodes whose jobs have a folder each, behind which the nodes keep a store."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from stager.request.items import Space
from tests.support.tree_world import TreeWorld

if TYPE_CHECKING:
    from pathlib import Path

    from mpi4py import MPI

    from stager.base.outcome import ItemReport

#: The folders of three jobs.
JOBS = ("/job1", "/job2", "/job3")


class StoreWorld(TreeWorld):
    """Nodes to which one folder is staged again and again, to another place each time."""

    def __init__(self, comm: MPI.Intracomm, folder: Path) -> None:
        super().__init__(comm, folder)
        self.disk = self.copy.parent.parent
        for job in JOBS:
            (self.disk / job[1:]).mkdir(exist_ok=True)
        space = Space(roots=("/nvme", *JOBS), private=JOBS, of_job=JOBS, store="/nvme")
        self.request = replace(self.request, space=space)

    def into(self, job: str, source: Path | None = None, **options: object) -> ItemReport:
        """Stage the source into a job's folder. Raise AssertionError unless it is done."""
        source = source or self.source
        destination = f"{job}/{source.name}"
        items = self.items(source=str(source), destination=destination, root=job, **options)
        outcome = self.run(items=items)
        assert not outcome.failures, outcome.failures
        (item,) = outcome.items
        assert item.destination == destination
        return item

    def seen(self, job: str, name: str = "source") -> Path:
        """Return where a job finds what was staged."""
        return self.disk / job[1:] / name

    @property
    def entries(self) -> Path:
        """Where this node keeps entries."""
        return self.disk / f"nvme/.slurm-stage/{os.getuid()}/store"

    def entry(self, name: str = "source") -> Path:
        """Return the only entry of that name."""
        (found,) = self.entries.glob(f"*/{name}")
        return found
