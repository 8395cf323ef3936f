"""What becomes of a job's comment when its stage has ended."""

from __future__ import annotations

import os
import string
import subprocess
import sys
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from stager.launch.job import with_result

if TYPE_CHECKING:
    from pathlib import Path

WORDS = st.text(string.ascii_letters + string.punctuation, min_size=1)


def test_a_result_is_one_printable_line_of_limited_length() -> None:
    assert with_result("", "no  ':' in a\x1b") == "slurm-stage: no ':' in a?"
    assert with_result("mine", "x" * 400) == f"mine; slurm-stage: {'x' * 297}..."


def test_the_lines_below_the_first_are_not_for_others() -> None:
    assert with_result("", "n1: not allowed\n  a secret") == "slurm-stage: n1: not allowed"


@given(st.lists(WORDS, min_size=1, max_size=4), WORDS.filter(lambda own: "stage: " not in own))
def test_the_users_part_stays_and_only_the_last_result_is_kept(
    results: list[str], own: str
) -> None:
    comment = own
    for result in results:
        comment = with_result(comment, result)
    if own != "(null)":
        assert comment == f"{own}; {with_result('', results[-1])}"


def test_a_users_comment_that_resembles_ours_stays() -> None:
    own = "step 1; stage: big; ticket=77"
    assert with_result(own, "ended with code 4") == f"{own}; slurm-stage: ended with code 4"


def test_a_result_is_written_in_utf_8_by_any_locale_and_for_one_job_of_an_array(
    tmp_path: Path,
) -> None:
    """Commands that tell how they were called stand in for Slurm's."""
    for name, prints in (("squeue", "mine"), ("scontrol", "")):
        command = tmp_path / name
        command.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$0" "$@" >>{tmp_path}/called\necho {prints}\n'
        )
        command.chmod(0o755)
    code = (
        "from stager.launch.job import write_comment\n"
        "job = {'SLURM_JOB_ID': '9', 'SLURM_ARRAY_JOB_ID': '7', 'SLURM_ARRAY_TASK_ID': '2'}\n"
        f"write_comment('/a\\u2026', job, '{tmp_path}/srun')"
    )
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **locale}, check=True)
    assert (tmp_path / "called").read_text() == (
        f"{tmp_path}/squeue\n--noheader\n--jobs=7_2\n--format=%k\n"
        f"{tmp_path}/scontrol\nupdate\nJobId=7_2\nComment=mine; slurm-stage: /a\u2026\n"
    )
