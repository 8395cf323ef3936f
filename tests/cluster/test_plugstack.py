"""A plugstack.conf that names the plugin twice, as an included file may do, or has a bad argument.

The plugin cannot tell which of two lines is meant: it refuses jobs that stage, and only those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster.cluster import USERS, CommandFailed, shown
from tests.cluster.site import PLUGSTACK, STAGECTL, remove_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.site import Site

OPTION = "--stage=/shared/a:/nvme/a"
REFUSED = (
    "spank_stage.so is named more than once in plugstack.conf, so nothing can be staged; "
    "tell the administrator to keep one line\n"
)
MISSPELT = PLUGSTACK.replace("config=", "conf=")
ARGUMENT = "plugstack.conf: argument 'conf=/etc/slurm/stage.toml' is not valid; "


@pytest.fixture
def twice(site: Site) -> Iterator[Site]:
    """The site with two lines for the plugin."""
    site.run("echo a > /shared/a")
    folder = site.path("login", "/etc/slurm/plugstack.d")
    folder.mkdir()
    for name in ("one", "two"):
        (folder / name).write_text(PLUGSTACK)
    site.write_plugstack("include /etc/slurm/plugstack.d/*\n")
    yield site
    site.write_plugstack(PLUGSTACK)
    remove_all([folder])


@pytest.fixture
def misspelt(site: Site) -> Iterator[Site]:
    """The site with an argument that the plugin does not know."""
    site.write_plugstack(MISSPELT)
    yield site
    site.write_plugstack(PLUGSTACK)


@pytest.mark.parametrize(
    "line",
    [
        ["sbatch", OPTION, "--wrap", "true"],
        ["salloc", OPTION, "true"],
        ["srun", OPTION, "true"],
        ["sbatch", "-N1", ":", "-N1", OPTION, "--wrap", "true"],
    ],
    ids=["sbatch", "salloc", "srun", "heterogeneous"],
)
def test_a_job_that_stages_is_refused(twice: Site, line: list[str]) -> None:
    with pytest.raises(CommandFailed) as refused:
        twice.run(line)
    assert (refused.value.code, refused.value.stdout) == (3, "")
    assert refused.value.stderr == f"stage: {REFUSED}"
    assert twice.run(["squeue", "-h"]).stdout == ""


def test_a_job_with_stage_lines_fails(twice: Site) -> None:
    job = twice.sbatch("#!/bin/bash\n#STAGE /shared/a:/nvme/a\necho started\n", "-N1", "-w", "n1")
    state = job.wait()
    assert (state.state, state.exit_code) == ("FAILED", "3:0")
    assert job.output() == f"stage: n1: {REFUSED}"


def test_a_job_that_was_submitted_before_fails(twice: Site) -> None:
    twice.write_plugstack(PLUGSTACK)
    job = twice.sbatch("echo started", "-N1", "-w", "n1", "--hold", OPTION)
    twice.write_plugstack("include /etc/slurm/plugstack.d/*\n")
    twice.run(["scontrol", "release", job.id])
    state = job.wait()
    assert (state.state, state.exit_code) == ("FAILED", "3:0")
    assert job.output() == f"stage: n1: {REFUSED}"


def test_jobs_that_do_not_stage_run_as_usual(twice: Site) -> None:
    job = twice.sbatch("srun -N2 echo task", "-N2")
    assert job.wait().exit_code == "0:0"
    assert (job.message, job.output()) == ("", "task\n" * 2)
    done = twice.run(["salloc", "-N1", "srun", "echo", "task"])
    assert done.stdout == "task\n"
    assert "stage" not in done.stderr
    het = ["sbatch", "--parsable", "-N1", ":", "-N1", "-o", "/dev/null", "--wrap", "true"]
    assert twice.run(het).stderr == ""


def test_slurmd_names_the_fault(twice: Site) -> None:
    log = twice.base / "log/slurmd-n2.log"
    before = log.stat().st_size
    twice.restart_slurmd("n2")
    assert f"error: stage: {REFUSED}" in log.read_text()[before:]


def test_a_job_with_a_bad_argument_fails_with_the_same_code(misspelt: Site) -> None:
    misspelt.write_plugstack(PLUGSTACK)
    job = misspelt.sbatch("echo started", "-N1", "-w", "n1", "--hold", OPTION)
    misspelt.write_plugstack(MISSPELT)
    misspelt.run(["scontrol", "release", job.id])
    state = job.wait()
    assert (state.state, state.exit_code) == ("FAILED", "3:0")
    assert job.output() == f"stage: n1: {ARGUMENT}tell the administrator\n"


def test_slurmd_names_a_bad_argument(misspelt: Site) -> None:
    log = misspelt.base / "log/slurmd-n2.log"
    before = log.stat().st_size
    misspelt.restart_slurmd("n2")
    expected = f"error: stage: {ARGUMENT}write python=/PATH and config=/PATH"
    assert expected in log.read_text()[before:]


def test_doctor_names_a_slurmd_that_was_started_without_the_line(site: Site) -> None:
    try:
        site.write_plugstack("")
        site.restart_slurmd("n2")
        site.write_plugstack(PLUGSTACK)
        told = site.run(f"{STAGECTL} doctor || true", on="n2").stdout
    finally:
        site.write_plugstack(PLUGSTACK)
        site.restart_slurmd("n2")
    text = "slurmd was started without the plugin, so jobs are not cleaned up after: restart slurmd"
    assert text in " ".join(told.split())
    assert text not in " ".join(site.run(f"{STAGECTL} doctor || true", on="n2").stdout.split())


def test_a_job_with_a_node_without_the_line_fails_although_an_earlier_job_left_its_folder(
    site: Site,
) -> None:
    site.run("echo a > /shared/a")
    try:
        for machine in ("login", "n1"):
            site.path(machine, "/run/local").mkdir()
            site.path(machine, "/run/local/stage.conf").write_text(PLUGSTACK)
        site.write_plugstack("include /run/local/*.conf\n")
        left = f"/run/slurm-stage/{USERS['alice']}"
        site.run(f"install -d -o alice -m 700 {left}", user="root", on="n2")
        job = site.sbatch("srun echo started", "-N2", "-wn[1-2]", OPTION)
        state = job.wait()
        step = site.run(["srun", "-N2", "-wn[1-2]", OPTION, "hostname"], check=False)
    finally:
        site.write_plugstack(PLUGSTACK)
        for machine in ("login", "n1"):
            remove_all([site.path(machine, "/run/local")])
        remove_all([site.path("n2", left)])
    assert (state.state, state.exit_code) == ("FAILED", "8:0")
    why = (
        "stage: n2: slurm-stage did not run on this node; tell the administrator (stagectl doctor "
        "there says why)\n"
    )
    assert job.output() == (f"{why}stage: the job's own program was not started (exit code 8)\n")
    # Its task on n2 did not wait. What slurmstepd says may come before, after or between.
    assert shown(step) == (
        f"n2\n{why}"
        "stage: the job's own program was not started where slurm-stage runs (exit code 8)\n"
    )
    site.assert_healthy()
