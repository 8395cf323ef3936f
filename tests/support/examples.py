"""Examples of Hypothesis that all ranks of an MPI world try together, the same on each."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from hypothesis import Phase, given, settings

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy
    from mpi4py import MPI

T = TypeVar("T")


def drawn(comm: MPI.Intracomm, strategy: SearchStrategy[T], count: int = 60) -> list[T]:
    """Return up to so many examples, which rank 0 draws for all.

    Hypothesis also tries the constants of the modules that a process has imported: ranks that
    draw by themselves may differ, and then wait for each other for ever.
    """
    examples: list[T] = []

    @settings(max_examples=count, derandomize=True, database=None, phases=[Phase.generate])
    @given(strategy)
    def draw(example: T) -> None:
        examples.append(example)

    if comm.rank == 0:
        draw()
    examples = comm.bcast(examples)
    return examples
