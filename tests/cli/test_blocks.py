"""Bars of block characters: shares, and lengths to scale."""

from __future__ import annotations

import io

import pytest

from stager.base.text import columns
from stager.cli.terminal import Blocks

BLOCKS, ASCII = Blocks("▏▎▍▌▋▊▉█", "░"), Blocks("#", ".")
PHASES = {"launch": 0.5, "MPI init": 1.0, "read": 0.0, "broadcast": 2.25, "end": 0.25}


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


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (74, f"launch ████▋ MPI init █████████▎ broadcast {'█' * 20}▊ end ██▎"),
        (34, "broadcast ███████▉ others ██████▏"),
        (33, "broadcast ███████▎ others █████▊"),
        (29, ""),
    ],
)
def test_lengths_are_drawn_to_scale_within_a_width(width: int, line: str) -> None:
    assert BLOCKS.scale(PHASES, width) == line


@pytest.mark.parametrize("blocks", [BLOCKS, ASCII])
@pytest.mark.parametrize(
    ("lengths", "least"), [(PHASES, 30), ({"数据": 1e-6, "b": 9.0}, 22), ({"a": 3.0}, 13)]
)
def test_a_line_to_scale_is_never_wider(
    blocks: Blocks, lengths: dict[str, float], least: int
) -> None:
    lines = {width: blocks.scale(lengths, width) for width in range(-7, 200)}
    assert all(columns(line) <= max(0, width) for width, line in lines.items())
    assert [width for width, line in lines.items() if line] == [*range(least, 200)]


@pytest.mark.parametrize("lengths", [{}, {"read": 0.0}])
def test_nothing_is_drawn_of_nothing(lengths: dict[str, float]) -> None:
    assert BLOCKS.scale(lengths, 80) == ""
