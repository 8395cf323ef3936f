"""Bars of block characters."""

from __future__ import annotations

import io

import pytest

from stager.cli.terminal import Blocks

BLOCKS, ASCII = Blocks("█", "░"), Blocks("#", ".")


@pytest.mark.parametrize(
    ("encoding", "blocks"), [("utf-8", BLOCKS), ("ascii", ASCII), ("latin-1", ASCII)]
)
def test_a_terminal_gets_the_characters_that_it_has(encoding: str, blocks: Blocks) -> None:
    assert Blocks.of(io.TextIOWrapper(io.BytesIO(), encoding)) == blocks


@pytest.mark.parametrize(
    ("count", "total", "bar"),
    [
        (0, 4, "░░░░░░░░"),
        (1, 4, "██░░░░░░"),
        (4, 4, "████████"),
        (1, 156, "█░░░░░░░"),
        (155, 156, "███████░"),
        (0, 0, "░░░░░░░░"),
    ],
)
def test_only_all_are_a_full_bar_and_only_none_an_empty_one(
    count: int, total: int, bar: str
) -> None:
    assert BLOCKS.share(count, total) == bar
