"""The ranks of a communicator as nodes, for tests of whole stages."""

from __future__ import annotations

import os
import time
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from stager.base.options import Options, Validate
from stager.base.telemetry import Phase, Stopwatch
from stager.rank.agree import Context, Node
from stager.rank.program import run
from stager.request.items import StageItem, StageRequest
from stager.wire.channel import Channel
from stager.wire.layout import KEY_SIZE, Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mpi4py import MPI

    from stager.base.outcome import Outcome


class World:
    """The ranks of ``comm``; each has a folder beneath ``folder`` as its node's disk.

    Subclasses make the source, which is staged to ``/nvme/{name}``. If ``is_shared``, all see the
    first one's disk.
    """

    def __init__(
        self, comm: MPI.Intracomm, folder: Path, name: str, *, is_shared: bool = False
    ) -> None:
        self.comm = comm
        self.source = folder / "source"
        disk = folder / ("shared" if is_shared else f"node{comm.rank}")
        (disk / "nvme").mkdir(parents=True, exist_ok=True)
        self.node = Node(f"node{comm.rank}", str(disk), os.getuid())
        self.copy = disk / "nvme" / name
        self.nodes = [f"node{rank}" for rank in range(comm.size)]
        options = Options(validate=Validate.STAT)
        item = StageItem(str(self.source), f"/nvme/{name}", "/nvme", options)
        self.request = StageRequest(
            items=(item,), nodes=comm.size, lock_timeout=0.2,
            transfer=Settings(chunk=4096, depth=2),
        )  # fmt: skip
        self.channel = Channel(comm, bytes(KEY_SIZE), self.node.name)

    @property
    def context(self) -> Context:
        """The context that the collective functions take."""
        return Context(self.comm, self.node, self.request, self.channel)

    def rename(self, name: str) -> None:
        """Let this rank's node have another name. Collective."""
        self.node = replace(self.node, name=name)
        self.channel = Channel(self.comm, bytes(KEY_SIZE), name)

    def on_first(self, act: Callable[[], object]) -> None:
        """Run ``act`` on the first rank while all others wait."""
        if self.comm.rank == 0:
            act()
        self.comm.Barrier()

    def on_last(self, act: Callable[[], object]) -> None:
        """Run ``act`` on the last rank while all others wait."""
        if self.comm.rank == self.comm.size - 1:
            act()
        self.comm.Barrier()

    def run(self, **changes: object) -> Outcome:
        """Run the request with ``changes``. All ranks must return the same failures."""
        request = replace(self.request, **changes)  # type: ignore[arg-type]
        context = Context(self.comm, self.node, request, self.channel)
        outcome = run(context, Stopwatch(time.monotonic(), Phase.SURVEY))
        assert self.comm.bcast(outcome.failures) == outcome.failures
        return outcome

    def items(self, **changes: object) -> tuple[StageItem, ...]:
        """Return the request's one item with ``changes`` of its fields or options."""
        names = {field.name for field in fields(Options)}
        chosen = {name: value for name, value in changes.items() if name in names}
        others = {name: value for name, value in changes.items() if name not in names}
        item = self.request.items[0]
        options = replace(item.options, **chosen)  # type: ignore[arg-type]
        return (replace(item, options=options, **others),)  # type: ignore[arg-type]


def messages(outcome: Outcome) -> list[str]:
    """Return the failures as text: code, node and message of each."""
    return [f"{failure.code} {failure.node}: {failure.message}" for failure in outcome.failures]
