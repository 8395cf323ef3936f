"""Send a compressed file, or receive and decompress it: every node keeps what is in it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from stager.archive.single import decompress
from stager.disk.files import stage_errors
from stager.rank.file_cargo import FileCargo
from stager.rank.unpacker import Piped, limits_of
from stager.wire.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stager.disk.partial import Partial
    from stager.rank.cargo import Opened, Published


class DecompressCargo(FileCargo):
    """One compressed file. The size of the copy is not known before all of it is there.

    A receiver always reads the source: a copy has other bytes.
    """

    _decoder: Piped[str] | None = None
    #: The digest of the copy, once it is sealed.
    _digest = ""

    def need(self) -> int:
        before = self.task.cache.load(self.task.item.destination)
        estimate = before.copy_facts.size if before and before.decompressed else 0
        return max(estimate, self.task.source.allocated)

    def need_in_all(self) -> int:
        return self.need()

    def open(self) -> Opened:
        opened = super().open()
        if self._partial:
            self.writer = self._decoder = self._make_decoder(self._partial)
            self.stack.callback(self._decoder.close)
        return opened

    def _make_decoder(self, copy: Partial) -> Piped[str]:
        name, folder = self.task.item.source, self.task.cache.partial
        with stage_errors(folder):
            limits = limits_of(self.task)
        take = partial(decompress, name=name, partial=copy, limits=limits)
        return Piped(take, name=name, folder=folder, verb="decompress")

    def layout(self, opened: Sequence[Opened]) -> Layout:
        return Layout.dense(self.task.plan.size, self.task.settings.chunk)

    def allocate(self, layout: Layout) -> None:
        """Do nothing: how much room it takes is not known. `Limits` ends it when there is none."""

    def seal(self) -> None:
        if self._decoder:
            self._decoder.finish()
            self._digest = self._decoder.result or ""
        super().seal()

    def verify(self, digest: str) -> None:
        super().verify(self._digest)

    def publish(self, digest: str) -> Published:
        return super().publish(self._digest)
