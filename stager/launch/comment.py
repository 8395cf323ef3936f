"""Write how a job's stage ended into the job's comment, which is seen from outside of the job."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base.text import printable
from stager.launch.commands import answer

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Seconds in which squeue and scontrol must end. The comment is not worth a longer wait.
_TIMEOUT = 5
#: What our part of a comment begins with, and what is between it and the user's.
_OURS, _BETWEEN = "slurm-stage: ", "; "
#: Characters of our part.
_LONGEST = 300


def write_comment(text: str, environment: Mapping[str, str], srun: str) -> None:
    """Add ``text`` to the comment of the job that this process runs in, if Slurm answers."""
    job = _own_id(environment)
    with suppress(TimeoutError):
        told = answer(["squeue", "--noheader", f"--jobs={job}", "--format=%k"], srun, _TIMEOUT)
        if told:  # a job without a comment has (null)
            comment = with_result(told.strip(), text)
            # In UTF-8, which the user's locale may lack.
            text_of_slurm = f"Comment={comment}".encode(errors="replace")
            answer(["scontrol", "update", f"JobId={job}", text_of_slurm], srun, _TIMEOUT)


def with_result(comment: str, text: str) -> str:
    """Return a job's comment with ``text`` at its end, in place of an earlier stage's. Pure.

    Of the text only the first line: others see comments, and the lines below it are for the user.

    >>> with_result("(null)", "ended with code 4")
    'slurm-stage: ended with code 4'
    >>> with_result("my run; slurm-stage: ended with code 4", "ended with code 5")
    'my run; slurm-stage: ended with code 5'
    """
    if comment == "(null)" or comment.startswith(_OURS):
        comment = ""
    own, _, _ = comment.partition(f"{_BETWEEN}{_OURS}")
    text = printable(" ".join(text.partition("\n")[0].split()))
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 3]}..."
    return f"{own}{_BETWEEN if own else ''}{_OURS}{text}"


def _own_id(environment: Mapping[str, str]) -> str:
    """Return this job's id. The plain number of one job of an array would mean all of them."""
    array, task = (environment.get(f"SLURM_ARRAY_{name}_ID", "") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"]
