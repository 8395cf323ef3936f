"""What the letters of stage.toml's patterns stand for in a job and outside of one."""

from __future__ import annotations

import os

import pytest

from stager.base.users import name_or_uid
from stager.request.names import fill_letters, letters_at_submission, letters_of

USER = {"u": name_or_uid(os.getuid()), "U": str(os.getuid())}


def test_outside_of_a_job_the_user_is_known() -> None:
    assert letters_of({"USER": "bob", "SLURM_RESTART_COUNT": "1"}) == USER


def test_in_a_job_it_is_known_too() -> None:
    job = {"SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "train"}
    assert letters_of(job) == USER | {"j": "12", "A": "12", "r": "0", "x": "train"}
    task = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}
    assert letters_of(job | task) == USER | {"j": "12", "A": "9", "a": "3", "r": "2", "x": "train"}


def test_before_a_job_has_a_number_the_letters_stand_for_themselves() -> None:
    assert fill_letters("/l/%u.%j.%r", letters_at_submission({})) == f"/l/{USER['u']}.%j.%r"


@pytest.mark.parametrize("value", ["", ".", "..", "a/b", "/"])
def test_nothing_that_is_filled_in_leads_elsewhere(value: str) -> None:
    with pytest.raises(ValueError, match="%x"):
        fill_letters("/l/%x", {"x": value})
