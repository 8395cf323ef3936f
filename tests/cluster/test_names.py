"""Names in directives: what is filled in for them in a job, and which are refused where."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.cluster.cluster import CommandFailed

if TYPE_CHECKING:
    from tests.cluster.site import Site

FOLDER = "/shared/names"
#: Of the user's environment.
VARIABLES = {"SCRATCH": f"{FOLDER}/deep"}


@pytest.fixture(autouse=True)
def _sources(site: Site) -> None:
    site.run(f"mkdir -p {FOLDER}/deep; cd {FOLDER}; for n in a b c; do echo $n >$n; done; cp b ~")
    site.run(f"echo deep > {FOLDER}/deep/c")


def ran(site: Site, script: str, *options: str, code: int = 0, warned: str = "") -> list[str]:
    """Return the lines of a job's output, submitted from the folder with the sources."""
    path = f"{FOLDER}/job.sh"
    site.run(["tee", path], input=f"#!/bin/bash\n{script}\n")
    output = f"--output={FOLDER}/out.%a"
    line = ["sbatch", "--wait", "-N1", "-wn1", output, *options, path]
    done = site.run(line, cwd=FOLDER, env=VARIABLES, check=False)
    said = site.run(f"cat {FOLDER}/out.*; rm {FOLDER}/out.*").stdout
    assert (done.returncode, done.stderr) == (code, warned), said
    return said.splitlines()


def test_names_are_filled_in_when_the_job_starts(site: Site) -> None:
    listed = "a:/nvme/%u/%j/%x;~/b:/nvme/$USER/${SLURM_JOB_ID}/b;$SCRATCH/c:/nvme/alice/c%%"
    script = """#STAGE deep/../c:/nvme/alice/%U_%r
#STAGE ${SCRATCH}/c:/nvme/alice/$SLURM_JOB_NAME
cd /nvme/alice; cat $SLURM_JOB_ID/named $SLURM_JOB_ID/b c% $(id -u)_0 named
srun true
cd /shared; srun '--stage=a:/nvme/alice/%j/step' cat /nvme/alice/$SLURM_JOB_ID/step
"""
    lines = ran(site, script, f"--stage={listed}", "--job-name=named")
    assert [line for line in lines if not line.startswith("stage:")] == [
        "a", "b", "deep", "c", "deep", "a",
    ]  # fmt: skip
    assert sum(" to n1 in " in line for line in lines) == 6, lines


def test_a_step_stages_what_its_names_stand_for_now(site: Site) -> None:
    """Also if an earlier step asked for the same text."""
    script = f"""srun '--stage=$SCRATCH/c:/nvme/alice/%j/c' cat /nvme/alice/$SLURM_JOB_ID/c
export SCRATCH={FOLDER}
srun '--stage=$SCRATCH/c:/nvme/alice/%j/%x' -J d cat /nvme/alice/$SLURM_JOB_ID/d
srun '--stage=$SCRATCH/c:/nvme/alice/%j/%x' -J e cat /nvme/alice/$SLURM_JOB_ID/e
srun '--stage=a:/nvme/alice/%j/f' cat /nvme/alice/$SLURM_JOB_ID/e
"""
    lines = ran(site, script, "--stage=$SCRATCH/c:/nvme/alice/%j/own")
    assert of_script(lines) == ["deep", "c", "c", "c"]
    assert sum("/own: " in line for line in lines) == 1, lines


def test_a_variable_is_what_it_was_where_the_job_was_submitted(site: Site) -> None:
    wish, see = "--stage=$SCRATCH/c:/nvme/alice/c", "cat /nvme/alice/c"
    assert "deep" in ran(site, see, "--export=NONE", wish)
    script = f"export SCRATCH=/nowhere; srun {see}; srun '--stage=$SCRATCH/c:/nvme/d' true"
    done = site.run(
        ["salloc", "-N1", "-wn1", wish, "bash", "-c", script], env=VARIABLES, check=False
    )
    assert done.stdout == "deep\n"
    assert "/nowhere/c" in done.stderr


def test_a_job_is_staged_also_if_it_is_submitted_without_a_stdout(site: Site) -> None:
    options = f"--wait -N1 -wn1 -o {FOLDER}/out --stage=a:/nvme/alice/a"
    site.run(f"sbatch {options} --wrap 'cat /nvme/alice/a' >&-", cwd=FOLDER, check=False)
    assert site.run(f"cat {FOLDER}/out; rm {FOLDER}/out").stdout.endswith("\na\n")


def test_each_task_of_an_array_has_its_own_path(site: Site) -> None:
    path = "/nvme/array-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    script = f"echo $SLURM_ARRAY_JOB_ID $(cat {path})"
    lines = ran(site, script, "--array=3-4", "--stage=a:/nvme/array-%A_%a")
    first, second = sorted(line for line in lines if not line.startswith("stage:"))
    assert first == second
    assert first.split()[1:] == ["a"]
    assert sum("/nvme/array-" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("value", "problem", "options"),
    [
        (
            "a:/nvme/%x",
            (
                "%x is the job's name, 'a/b', which cannot be in a path; write \\%x for these "
                "characters"
            ),
            ["--job-name=a/b"],
        ),
        (
            "$NOT_SET/a:/nvme/a",
            "NOT_SET is not set in the job's environment; set it, or write its value",
            [],
        ),
        (
            "a:/nvme/%a",
            "%a is not known outside of a job array; write \\%a for these characters",
            [],
        ),
    ],
)
def test_what_a_job_cannot_fill_in_fails_it(
    site: Site, value: str, problem: str, options: list[str]
) -> None:
    warned = (
        "stage: warning: NOT_SET is not set here; the job fails unless its environment has it\n"
    )
    warned = warned if "NOT_SET" in value else ""
    lines = ran(site, "echo started", f"--stage={value}", *options, code=2, warned=warned)
    assert lines[:2] == [f"stage: {problem}", f"  {value}"]
    assert lines[3:] == ["stage: the job's own program was not started (exit code 2)"]


def test_a_variable_that_is_not_the_site_s_is_refused_by_sbatch(site: Site) -> None:
    with pytest.raises(CommandFailed) as caught:
        site.sbatch("true", "--stage=/shared/a:$TMPDIR/a")
    assert (caught.value.code, caught.value.stderr) == (
        2,
        (
            "stage: $TMPDIR is no variable of this site's disks; known: $USER $SLURM_JOB_ID "
            "$SLURM_ARRAY_JOB_ID $SLURM_ARRAY_TASK_ID $SLURM_JOB_NAME $SLURM_RESTART_COUNT (for a "
            "variable that only the script knows, run stagectl stage in the script)\n"
            "  /shared/a:$TMPDIR/a\n            ^\n"
        ),
    )


#: A path that a shell, or whoever else evaluated it, would change.
AWKWARD = "/nvme/$(id) 'q\" `id`"
PRINT = "printf '%s\\n'"


#: What srun says where it must wait for the end of the step before.
WAIT = re.compile(r"srun: (Job \d+ step creation temporarily disabled|Step created for )")


def of_script(lines: list[str]) -> list[str]:
    return [line for line in lines if not (line.startswith("stage:") or WAIT.match(line))]


def test_each_task_of_an_array_finds_its_copy_by_its_name(site: Site) -> None:
    see = f'{PRINT} "$STAGE_w" "$(cat "$STAGE_w")"; srun printenv STAGE_w'
    wish = f"--stage=a:{AWKWARD.replace('$', chr(92) + '$')}/%a,as=w"
    lines = of_script(ran(site, see, "--array=3-4", wish))
    assert lines == [
        line for task in "34" for line in (f"{AWKWARD}/{task}", "a", f"{AWKWARD}/{task}")
    ]


def test_a_step_finds_the_jobs_copies_and_its_own_by_name(site: Site) -> None:
    script = """srun '--stage=/shared/names/b:/nvme/b,as=w' sh -c 'echo $STAGE_v $STAGE_w'
srun --ntasks=2 sh -c 'echo $STAGE_v $STAGE_w'
"""
    wish = f"--stage={FOLDER}/a:/nvme/a"
    site.sbatch("true", "-wn1", wish).wait()
    job = site.sbatch(script, "-wn1", "--ntasks=2", f"{wish},as=v")
    job.wait()
    assert "stage: /nvme/a: current on n1, nothing moved" in job.output()
    found = of_script(job.output().splitlines())
    assert found == ["/nvme/a /nvme/b"] * 2 + ["/nvme/a"] * 2


def test_the_steps_of_salloc_find_copies_by_name(site: Site) -> None:
    script = 'echo "<$STAGE_v>"; srun printenv STAGE_v; srun --stage=b:/nvme/b,as=v true'
    line = ["salloc", "-N1", "-wn1", "--stage=a:/nvme/a,as=v", "bash", "-c", script]
    done = site.run(line, cwd=FOLDER, check=False)
    assert (done.returncode, done.stdout) == (2, "<>\n/nvme/a\n")
    problem = "as=v is given to both /nvme/a and /nvme/b; choose two names"
    assert f"stage: {problem}\n" in done.stderr
    with pytest.raises(CommandFailed) as caught:
        site.sbatch("true", "--stage=/a:/nvme/a,as=v;/b:/nvme/b,as=v")
    assert (caught.value.code, caught.value.stderr) == (2, f"stage: {problem}\n")


@pytest.mark.usefixtures("_task_prolog")
def test_with_task_prolog_a_script_finds_a_copy_by_its_name(site: Site) -> None:
    line = f"#STAGE a:{AWKWARD.replace('$', chr(92) + '$')}/a,as=w"
    script = f'{line}\n{PRINT} "$STAGE_w" "$(cat "$STAGE_w")"; srun printenv STAGE_w'
    assert of_script(ran(site, script)) == [f"{AWKWARD}/a", "a", f"{AWKWARD}/a"]
