"""The plugin's look at a batch script (prolog/spank/script.c), compiled with sanitizers.

The C code is compared with the helper: whatever that takes for a directive or refuses must make
the plugin hold the job, or the job would start without its files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.cli.arguments import read_head
from stager.request.script import may_stage as asks
from tests.support.compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: The characters that are white space in a regular expression of Python.
BLANKS = [character for character in map(chr, range(0x3001)) if character.isspace()]
#: Pieces of scripts in which the two could differ: whole and torn characters, and line ends.
PIECES = [
    *["#STAGE", "#STAGE /a:/b", "#", "#!/bin/sh", "#SBATCH -N2", "x", "é", "#STAGEé", "\0", "\x7f"],
    *["#SBATCH", "--stage", "=", "'"],
    *["\n", "\n", "\n", "\r", "\r\n", *BLANKS],
]
TORN = [b"\xc2", b"\xa0", b"\xe2\x80", b"\xff", b"\xef\xbb\xbf"]


@pytest.fixture(scope="module")
def may_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bytes], bool]]:
    """Ask the compiled code whether a script with these bytes may have #STAGE lines."""
    folder = tmp_path_factory.mktemp("script")
    path = folder / "job.sh"
    with compiled("script", folder) as ask:

        def write_and_ask(script: bytes) -> bool:
            path.write_bytes(script)
            return ask(str(path))

        yield write_and_ask


def stages(script: bytes, path: Path) -> bool:
    """Return whether the helper finds a directive in the script, or refuses it."""
    path.write_bytes(script)
    return asks(read_head(str(path)))


@pytest.mark.parametrize("blank", BLANKS, ids=ascii)
def test_all_white_space_that_python_knows_ends_the_word(
    may_stage: Callable[[bytes], bool], tmp_path: Path, blank: str
) -> None:
    script = f"#!/bin/sh\n#STAGE{blank}/a:/b\ndate\n".encode()
    assert stages(script, tmp_path / "job.sh")
    assert may_stage(script)


@pytest.mark.parametrize("blank", BLANKS, ids=ascii)
def test_a_line_of_white_space_that_python_knows_does_not_end_the_head(
    may_stage: Callable[[bytes], bool], tmp_path: Path, blank: str
) -> None:
    script = f"#!/bin/sh\n{blank}\n{blank}# why\n#STAGE /a:/b\ndate\n".encode()
    assert stages(script, tmp_path / "job.sh")
    assert may_stage(script)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (b"", False),
        (b"#!/bin/sh\ndate\n", False),
        (b"#!/bin/sh\n#STAGE /a:/b\ndate\n", True),
        (b"#!/bin/sh\n#STAGE", True),
        (b"#!/bin/sh\r\n#STAGE /a:/b\r\n", True),
        (b"#!/bin/sh\r#STAGE /a:/b\r", False),
        (b"#!/bin/sh\n#\0\r#STAGE /a:/b\n", False),
        (b"#!/bin/sh\n# why\rdate\n#STAGE /a:/b\n", True),
        (b"#!/bin/sh\ndate\n#STAGE /a:/b\n", False),
        (b"#!/bin/sh\n #STAGE /a:/b\n", False),
        (b"#!/bin/sh\n##STAGE /a:/b\n", False),
        (b"#!/bin/sh\n#STAGED /a:/b\n", False),
        (b"#!/bin/sh\n#STAGE=/a:/b\n", False),
        (b"#!/bin/sh\n#stage /a /b\n", False),
        (b"#!/bin/sh\n#SBATCH --stage=/a:/b\n", False),
        (b"#!/bin/sh\n#SBATCH --stage=/a:/b#1\n", True),
        (b"#!/bin/sh\n#SBATCH -JN#1 --stage=/a:/b\n", True),
        (b"#!/bin/sh\n#SBATCH -JN#1\n", False),
    ],
)
def test_a_script_may_stage_if_its_head_has_a_line(
    may_stage: Callable[[bytes], bool], tmp_path: Path, script: bytes, expected: bool
) -> None:
    assert stages(script, tmp_path / "job.sh") is expected
    assert may_stage(script) is expected


@given(st.lists(st.sampled_from([*(piece.encode() for piece in PIECES), *TORN]), max_size=12))
@settings(max_examples=3000, deadline=None)
def test_no_directive_of_any_script_is_missed(
    may_stage: Callable[[bytes], bool],
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[bytes],
) -> None:
    script = b"".join(pieces)
    if stages(script, tmp_path_factory.getbasetemp() / "job.sh"):
        assert may_stage(script)


def test_a_comment_that_sbatch_sees_as_a_shell_does_is_for_the_helper_to_tell(
    may_stage: Callable[[bytes], bool], tmp_path: Path
) -> None:
    script = b"#!/bin/sh\n#SBATCH --stage=/a:/b # or --stage=/c:/b\n"
    assert may_stage(script)
    assert not stages(script, tmp_path / "job.sh")


def test_a_script_that_cannot_be_read_to_its_end_may_stage(tmp_path: Path) -> None:
    with compiled("script", tmp_path) as ask:
        assert ask(str(tmp_path))  # reading a folder fails
        assert not ask(f"{tmp_path}/missing")
