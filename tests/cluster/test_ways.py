"""The ways in which a user requests a stage; each stages once a job, before any task starts."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest

from tests.cluster.cluster import shown
from tests.cluster.hostile import dead_folder
from tests.cluster.site import COPY, HANGS, IMAGE, PREFIX, STAGECTL, digest
from tests.cluster.watch import Watch
from tests.support.nightly import repeated

if TYPE_CHECKING:
    from tests.cluster.site import Site

A, B = "/shared/a:/nvme/a", "/shared/b:/nvme/b"
#: Fails if a task starts before its node has the files.
SEE_A = "cmp /shared/a /nvme/a && echo $(hostname) sees a"
SEE_B = "cmp /shared/b /nvme/b && echo $(hostname) sees b"


@pytest.fixture(autouse=True)
def _sources(site: Site) -> None:
    site.run("head -c 3000000 /dev/urandom > /shared/a; head -c 3000000 /dev/urandom > /shared/b")


def staged(name: str, nodes: str) -> str:
    """Return a pattern for the summary line of a file that moved to ``nodes``."""
    return rf"stage: /nvme/{name}: 2\.9 MiB from /shared/{name} to {re.escape(nodes)} in .*"


def skipped(name: str, nodes: str) -> str:
    """Return a pattern for the summary line of a file that ``nodes`` already had."""
    return rf"stage: /nvme/{name}: current on {re.escape(nodes)}, nothing moved .*"


#: What is the same on any number of nodes is tried on two.
NODES, TWO, ALL = ("n1", "n2"), "-wn1,n2", "n[1-2] (2 nodes)"
FOUR = "n[1-4] (4 nodes)"
MISSING = (
    "No such file or directory; check the path, and that the compute nodes mount this filesystem"
)


def check_lines(output: str, *patterns: str) -> None:
    """Check that the lines match the patterns one to one, in any order."""
    lines = output.splitlines()
    assert len(lines) == len(patterns), output
    for pattern in patterns:
        found = next((line for line in lines if re.fullmatch(pattern, line)), None)
        assert found, f"no line is {pattern}:\n{output}"
        lines.remove(found)


def test_stage_lines_in_the_script(site: Site) -> None:
    script = f"""#!/bin/bash
#SBATCH --nodes=4
#STAGE /shared/a:/nvme/a

# a comment
#STAGE /shared/b:/nvme/b,validate=always
srun bash -c '{SEE_A}; {SEE_B}'
#STAGE /shared/nonexistent:/nvme/too-late
"""
    job = site.sbatch(script)
    assert job.wait().exit_code == "0:0"
    sights = [f"{node} sees {name}" for node in site.nodes for name in "ab"]
    check_lines(job.output(), staged("a", FOUR), staged("b", FOUR), *sights)
    assert site.steps(job) == 2  # the helper's and the script's own


def test_the_option_may_be_repeated_and_may_hold_a_list(site: Site) -> None:
    job = site.sbatch(f"srun bash -c '{SEE_A}'", TWO, f"--stage={A}", f"--stage={B}")
    assert job.wait().exit_code == "0:0"
    sights = [f"{node} sees a" for node in NODES]
    check_lines(job.output(), staged("a", ALL), staged("b", ALL), *sights)
    job = site.sbatch("true", TWO, f"--stage={A};{B}")
    assert job.wait().exit_code == "0:0"
    check_lines(job.output(), skipped("a", ALL), skipped("b", ALL))
    assert site.steps(job) == 1


def test_sbatch_lines_in_the_script(site: Site) -> None:
    script = f"#!/bin/bash\n#SBATCH {TWO}\n#SBATCH --stage={A}\n#SBATCH --stage={B}\ntrue\n"
    job = site.sbatch(script)
    assert job.wait().exit_code == "0:0"
    check_lines(job.output(), staged("a", ALL), staged("b", ALL))


@pytest.mark.parametrize("export", ["NONE", repeated("ALL"), repeated("FOO=bar")])
def test_export_changes_nothing(site: Site, export: str) -> None:
    options = [TWO, f"--stage={A}", f"--stage={B}", f"--export={export}"]
    job = site.sbatch(f"srun --export=ALL /bin/bash -c '{SEE_A}; {SEE_B}'", *options)
    assert job.wait().exit_code == "0:0"
    sights = [f"{node} sees {name}" for node in NODES for name in "ab"]
    check_lines(job.output(), staged("a", ALL), staged("b", ALL), *sights)
    assert site.steps(job) == 2


def test_no_recursion_when_the_environment_is_lost(site: Site) -> None:
    job = site.sbatch(
        "srun /bin/true", TWO, f"--stage={A}", "--export=NONE", env={"SLURM_EXPORT_ENV": "NONE"}
    )
    assert job.wait().exit_code == "0:0"
    assert site.steps(job) == 2


def test_salloc_stages_with_its_first_srun(site: Site) -> None:
    commands = (
        f"srun bash -c '{SEE_A}'; srun echo again; srun -N1 -n1 --stage={B} bash -c '{SEE_B}'"
    )
    done = site.run(["salloc", TWO, f"--stage={A}", "bash", "-c", commands])
    sights = [f"{node} sees a" for node in NODES]
    check_lines(
        shown(done), staged("a", ALL), *sights, skipped("a", ALL), *["again"] * 2,
        skipped("a", "n1"), staged("b", "n1"), "n1 sees b",
    )  # fmt: skip


def test_salloc_on_a_terminal_says_whom_it_makes_wait(site: Site) -> None:
    line = f"script -qec 'salloc -N1 --stage={A} true' /dev/null </dev/null"
    assert site.run(line).stdout.splitlines()[0] == (
        "stage: each srun of this salloc stages first; an srun --jobid from elsewhere does not"
    )


def test_quiet_commands_print_failures_alone(site: Site) -> None:
    assert shown(site.run(["srun", "-Q", TWO, "--export=NONE", f"--stage={A}", "/bin/true"])) == ""
    steps = f"srun -Q true; srun --stage={B} true"
    check_lines(
        shown(site.run(["salloc", TWO, f"--stage={A}", "bash", "-c", steps])),
        skipped("a", ALL), staged("b", ALL),
    )  # fmt: skip
    lines = ["sbatch", "-Q", "-W", TWO, "-o", "/shared/out", f"--stage={A}", "--wrap"]
    assert shown(site.run([*lines, f"srun --stage={B} true; echo over"])) == ""
    assert site.shared("out").read_text() == "over\n"
    nothing = site.run(["srun", "-Q", "-N1", "--stage=/shared/c:/nvme/c", "true"], check=False)
    assert nothing.returncode == 4
    assert "stage: n1: /shared/c: No such file or directory; " in nothing.stderr


def test_help_shows_no_option_that_users_must_not_give(site: Site) -> None:
    for command in ("srun", "sbatch", "salloc"):
        options = re.findall(r"--stage\S*", site.run([command, "--help"]).stdout)
        of_script = ["--stage-tolerate=N|N%"] if command == "sbatch" else []
        assert options == ["--stage=SRC:DST[,key=value...]", *of_script]


def test_srun_outside_of_a_job_holds_all_tasks(site: Site) -> None:
    done = site.run(["srun", TWO, "--ntasks-per-node=2", f"--stage={A}", "bash", "-c", SEE_A])
    check_lines(shown(done), staged("a", ALL), *[f"{node} sees a" for node in NODES * 2])


def test_srun_outside_of_a_job_without_an_environment(site: Site) -> None:
    line = ["srun", TWO, "--export=NONE", f"--stage={A}", f"--stage={B}", "/bin/bash", "-c"]
    done = site.run([*line, f"{SEE_A}; {SEE_B}"])
    sights = [f"{node} sees {name}" for node in NODES for name in "ab"]
    check_lines(shown(done), staged("a", ALL), staged("b", ALL), *sights)


def test_an_srun_stages_what_it_asks_for_to_its_own_nodes(site: Site) -> None:
    """What the job itself asked for was staged before the script, and is left to it."""
    script = f"""
echo mine >/nvme/a
unset WHERE
srun -n1 -N1 --stage={B} cat /nvme/a
echo more >>/shared/b
srun bash -c 'echo $(hostname) $(ls /nvme)'
srun -n1 -N1 -w n2 --stage={B} echo second
srun -n1 -N1 --stage={B} echo third"""
    options = [TWO, "--stage=$WHERE/a:/nvme/a"]
    job = site.sbatch(script, *options, env={"WHERE": "/shared"})
    assert job.wait().exit_code == "0:0"
    # On a busy machine srun reports that the step before has not ended yet.
    lines = [line for line in job.output().splitlines() if not line.startswith("srun: ")]
    check_lines(
        "\n".join(lines), staged("a", ALL), staged("b", "n1"), "mine", "n1 a b", "n2 a",
        staged("b", "n2"), "second", staged("b", "n1"), "third",
    )  # fmt: skip
    assert site.steps(job) == 8  # the four, their three stages, and that of the job


def test_a_second_source_to_one_place_is_refused_within_a_job(site: Site) -> None:
    """Until the copy is evicted. The job's next run after a requeue may begin again."""
    script = f"""
on="srun -N1 -w $SLURMD_NODENAME"
for source in a b a; do $on --stage=/shared/$source:/nvme/x true; echo $source $?; done
$on {STAGECTL} stage /shared/b:/nvme/x; echo by hand $?
{STAGECTL} evict /nvme/x >&2
{STAGECTL} stage /shared/b:/nvme/x >&2; echo evicted $?
if [ -z "$SLURM_RESTART_COUNT" ]; then scontrol requeue $SLURM_JOB_ID; sleep 60; fi"""
    job = site.sbatch(script, "-N2", "--open-mode=append")
    assert job.wait().exit_code == "0:0"
    lines = job.output().splitlines()
    told = [line for line in lines if re.fullmatch(r"(a|b|by hand|evicted) \d+", line)]
    assert told == ["a 0", "b 9", "a 0", "by hand 9", "evicted 0"] * 2
    refused = (
        "/nvme/x was staged from /shared/a by this job; choose another destination, or evict it "
        "first: stagectl evict /nvme/x"
    )
    assert sum(line.endswith(f": {refused}") for line in lines) == 4


def test_a_job_submitted_by_a_staged_job_stages_nothing(site: Site) -> None:
    inner = "sbatch -N1 -W -o /home/alice/inner.out --wrap 'echo inner; env | grep -c SPANK'"
    job = site.sbatch(f"{inner}; cat /home/alice/inner.out", "-N1", f"--stage={A}")
    assert job.wait().exit_code == "0:0"
    summary, _, *rest = job.output().splitlines()
    assert re.fullmatch(staged("a", "n1"), summary)
    assert rest == ["inner", "0"]


#: What is said if a variable may be the cause of a refusal.
VARIABLE = (
    "SBATCH_STAGE is set, which counts as one more --stage; if it is the cause, correct or unset it"
)


def test_variables_of_sbatch_and_salloc_count_as_one_more_option(site: Site) -> None:
    variables = {"SBATCH_STAGE": f"{A};{B}", "SALLOC_STAGE": "/shared/none:/nvme/none"}
    inner = f"sbatch -N1 -w n1 -W -o /home/alice/inner.out --wrap '{SEE_B}'"
    script = f"#!/bin/bash\n#SBATCH --stage={B}\n{SEE_A}\n{inner} >&2\ncat /home/alice/inner.out"
    job = site.sbatch(script, "-N1", "-w", "n1", "-s", env=variables)
    assert job.wait().exit_code == "0:0"
    # An sbatch within the job reads the variable, as it reads its own variables.
    again = [skipped("a", "n1"), skipped("b", "n1"), "n1 sees b"]
    lines = [line for line in job.output().splitlines() if not line.startswith("Submitted ")]
    check_lines("\n".join(lines), staged("a", "n1"), staged("b", "n1"), "n1 sees a", *again)

    variables = {"SBATCH_STAGE": "/shared/none:/nvme/none", "SALLOC_STAGE": A}
    commands = f"srun bash -c '{SEE_A}'; srun echo again"
    done = site.run(["salloc", "-N2", "-w", "n[1-2]", "bash", "-c", commands], env=variables)
    sights = ["n1 sees a", "n2 sees a", "again", "again"]
    moved = r"stage: /nvme/a: 2\.9 MiB from the copy on n1 to n2 .*"
    check_lines(shown(done), moved, skipped("a", ALL), *sights)
    done = site.run(["srun", "-N1", "echo", "nothing"], env=variables)
    check_lines(shown(done), "nothing")

    variables = {"SBATCH_STAGE": "/shared/a"}
    done = site.run(["sbatch", "--wrap=true"], env=variables, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "stage: no ':' between source and destination: write SRC:DST\n  /shared/a\n           ^\n"
        f"stage: {VARIABLE}\n"
    )
    # The variable is right, and the option is wrong.
    done = site.run(["sbatch", "--stage=/b", "--wrap=true"], env={"SBATCH_STAGE": A}, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "stage: no ':' between source and destination: write SRC:DST\n  /b\n    ^\n"
        f"stage: {VARIABLE}\n"
    )
    parts = ["sbatch", "-N1", ":", "-N1", "--wrap=true"]
    done = site.run(parts, env={"SBATCH_STAGE": A}, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "stage: staging does not work in a heterogeneous job; submit each part as its own job\n"
        f"stage: {VARIABLE}\n"
    )
    done = site.run(["sbatch", "-N1", "-W", "--wrap=true"], env={"SBATCH_STAGE": ""})
    assert done.stderr == ""


def test_a_job_does_not_start_with_less_than_its_script_asks_for(site: Site) -> None:
    # For sbatch a comment begins at each '#'.
    cut, lost = "#SBATCH -N1 --stage=/shared/a:/nvme/h#1", f"#SBATCH -JN#1 --stage={B}"
    job = site.sbatch(f"#!/bin/bash\n{cut}\n{lost}\n#SBATCH -N1 # {A}\ndate\n")
    assert job.wait().exit_code == "2:0"
    problem = (
        "stage: sbatch takes this '#' for the beginning of a comment; put the value in quotes, or "
        "write a space before a comment"
    )
    assert job.output() == (
        f"{problem}\n  {cut}\n  {'^':>38}\n{problem}\n  {lost}\n  {'^':>12}\n"
        "stage: the job's own program was not started (exit code 2)\n"
    )
    assert not site.copy("n1", "/nvme/h").exists()
    quoted = "#SBATCH '--stage=/shared/a:/nvme/h#1' # not --stage=/shared/b:/nvme/h"
    job = site.sbatch(f"#!/bin/bash\n{quoted}\ncmp /shared/a /nvme/h#1 >&2\n", "-N1")
    assert job.wait().exit_code == "0:0", job.output()


def test_a_name_with_a_dollar_or_percent_sign_is_staged_if_it_is_escaped(site: Site) -> None:
    script = """#!/bin/bash
#SBATCH -N1 -w n1 --stage=/shared/a:/nvme/\\\\$USER/\\\\%j
#STAGE /shared/b:/nvme/\\$USER/~/b
cmp /shared/a '/nvme/$USER/%j' && cmp /shared/b '/nvme/$USER/~/b' && echo same
"""
    job = site.sbatch(script)
    assert job.wait().exit_code == "0:0"
    lines = job.output().splitlines()
    assert lines[2] == "same"
    check_lines(
        "\n".join(lines[:2]),
        r"stage: /nvme/\$USER/%j: 2\.9 MiB from /shared/a to n1 in .*",
        r"stage: /nvme/\$USER/~/b: 2\.9 MiB from /shared/b to n1 in .*",
    )


def test_check_and_sbatch_do_not_wait_for_a_filesystem_that_is_dead(site: Site) -> None:
    site.run("mkdir /home/alice/dead")
    values = ["/shared/a:/nvme/a", "/home/alice/dead/b:/nvme/b", "/shared/none:/nvme/none"]
    with dead_folder(site, "/home/alice/dead", node="login", user="alice"):
        begun = time.monotonic()
        done = site.run([STAGECTL, "check", *values])
        assert time.monotonic() - begun < HANGS
        submit = ["sbatch", "-N1", "--hold", *(f"--stage={value}" for value in values)]
        begun = time.monotonic()
        assert site.run([*submit, "--wrap=true"]).stderr == ""
        assert time.monotonic() - begun < HANGS
        site.run("scancel --user alice")
    assert done.stderr == (
        "stage: /home/alice/dead/b: not seen from this machine (no answer for 2 s); check the "
        "path, and that the compute nodes mount this filesystem\n"
    )


def test_sbatch_and_salloc_warn_of_a_source_that_the_login_node_does_not_see(site: Site) -> None:
    wanted = "--stage=/shared/nowhere:/nvme/a;/shared/*.bin:/nvme/b"
    warned = (
        "stage: warning: /shared/nowhere: not seen from this machine; check the path: it must be "
        "there when the job starts\n"
        "stage: warning: /shared/*.bin: not seen from this machine; patterns are not expanded: "
        "stage /shared with the option include=*.bin\n"
    )
    script = "srun --stage='/shared/*.bin:/nvme/c' true"
    done = site.run(
        ["sbatch", "-N1", "-W", "-o", "/home/alice/out", wanted, "--wrap", script], check=False
    )
    assert (done.returncode, done.stderr) == (4, warned)
    assert done.stdout.startswith("Submitted batch job ")
    assert site.run(["salloc", "-N1", wanted, "true"]).stderr.startswith(warned)
    assert "warning" not in site.run(["salloc", "-QN1", wanted, "true"]).stderr


def test_a_terminal_that_knows_nothing_of_slurm_stages_for_a_job(site: Site) -> None:
    job, other = (site.sbatch("sleep 300", nodes) for nodes in ("-wn[1-2]", "-wn3"))
    for one in (job, other):
        one.wait_for(lambda record: record["JobState"] == "RUNNING")
    stage = f"{STAGECTL} stage --job {job.id}"
    planned = site.run(f"{STAGECTL} plan --job {job.id} {A}", on="n2").stdout
    assert "n[1-2]" in planned
    measured = site.run(f"{STAGECTL} bench --job {job.id} --size 1", on="n2").stdout
    assert all(f"\n{node} " in measured for node in ("n1", "n2")), measured
    assert not site.copy("n1", "/nvme/a").exists()
    check_lines(site.run(f"{stage} {A}", on="n2").stdout, staged("a", "n[1-2] (2 nodes)"))
    inside = ["srun", f"--jobid={other.id}", "bash", "-c", f"{stage} {B}"]
    check_lines(site.run(inside).stdout, staged("b", "n[1-2] (2 nodes)"))
    in_use = site.run([STAGECTL, "evict", "/nvme/a"], on="n1", check=False)
    other.cancel()
    job.cancel()
    job.wait()
    assert in_use.returncode == 9
    ended = site.run(f"{stage} {A}", check=False)
    told = f"stage: job {job.id} is not running: its state is CANCELLED\n"
    assert (ended.returncode, ended.stderr) == (2, told)


def test_salloc_without_a_shell_is_told_how_to_stage(site: Site) -> None:
    said = (
        "stage: salloc --no-shell stages nothing; submit without --stage, then give --stage to "
        "srun --jobid=ID, or run stagectl stage --job ID SRC:DST\n"
    )
    for option in ("--no-shell", "--no-s"):
        done = site.run(["salloc", "-N2", option, f"--stage={A}"], check=False)
        assert (done.returncode, done.stderr) == (2, said)
    program = ["bash", "-c", "srun cmp /shared/a /nvme/a; echo $?, $1", "bash", "--no-shell"]
    done = site.run(["salloc", "-N1", "-wn1", f"--stage={A}", *program])
    check_lines(shown(done), staged("a", "n1"), "0, --no-shell")

    granted = site.run(["salloc", "-N1", "-wn2", "--no-shell"]).stderr
    number = re.search(r"job allocation (\d+)", granted)
    assert number
    step = site.run(["srun", f"--jobid={number[1]}", f"--stage={A}", "bash", "-c", SEE_A])
    site.run(["scancel", number[1]])
    check_lines(shown(step), r"stage: /nvme/a: 2\.9 MiB from /shared/a to n2 .*", "n2 sees a")


def test_an_array_stages_for_each_of_its_jobs(site: Site) -> None:
    job = site.sbatch(SEE_A, "-N1", "--array=1-6", f"--stage={A}", "-o", "/home/alice/%A-%a.out")
    assert job.wait().exit_code == "0:0"
    output = job.output()
    assert output.count(" sees a") == 6
    assert output.count("from /shared/a to n") >= 1
    assert output.count("from /shared/a to n") + output.count("nothing moved") == 6
    waits = [line for line in output.splitlines() if "waiting for" in line]
    assert all(re.search(r"waiting for job \d+ \(\d+_[1-6]\) on n\d", line) for line in waits)


def test_a_requeued_job_stages_again(site: Site) -> None:
    script = '[ "${SLURM_RESTART_COUNT:-0}" = 1 ] || { echo first; sleep 60; }; echo second'
    job = site.sbatch(script, TWO, "--requeue", "--open-mode=append", f"--stage={A}")
    job.wait_for(lambda _: "first" in job.output())
    job.requeue()
    state = job.wait()
    assert (state.exit_code, state.restarts) == ("0:0", 1)
    ours = ("stage:", "first", "second")  # and Slurm's own line of the requeue
    lines = [line for line in job.output().splitlines() if line.startswith(ours)]
    check_lines("\n".join(lines), staged("a", ALL), "first", skipped("a", ALL), "second")


def test_a_job_on_one_node(site: Site) -> None:
    job = site.sbatch(SEE_A, "-N1", "-w", "n3", f"--stage={A}")
    assert job.wait().exit_code == "0:0"
    check_lines(job.output(), staged("a", "n3"), "n3 sees a")
    assert not site.copy("n1", "/nvme/a").exists()


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_NTASKS": "7", "PYTHONPATH": "/nonexistent", "PYTHONHOME": "/nonexistent"},
        {
            "SLURM_CPUS_PER_TASK": "3",
            "SLURM_TRES_PER_TASK": "cpu:3",
            "LD_PRELOAD": "/nonexistent.so",
            "OMPI_MCA_btl": "nonexistent",
        },
        {
            "SLURM_EXCLUSIVE": "1",
            "SLURM_MPI_TYPE": "none",
            "SLURM_HINT": "nomultithread",
            "PMIX_RANK": "5",
        },
    ],
    ids=lambda environment: next(iter(environment)),
)
def test_the_environment_of_a_job_does_not_matter(site: Site, environment: dict[str, str]) -> None:
    exports = "".join(f"export {name}={value}; " for name, value in environment.items())
    done = site.run(
        f"{exports} sbatch -W {TWO} -o /home/alice/env.out --stage={A} --wrap true", check=False
    )
    output = site.path("login", "/home/alice/env.out").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + output
    check_lines(
        "\n".join(line for line in output.splitlines() if line.startswith("stage:")),
        staged("a", ALL),
    )


def test_many_tasks_on_a_node_share_one_rank(site: Site) -> None:
    job = site.sbatch(
        f"srun bash -c '{SEE_A}' | sort | uniq -c", TWO, "--ntasks-per-node=8", f"--stage={A}"
    )
    assert job.wait().exit_code == "0:0"
    check_lines(job.output(), staged("a", ALL), *[f" +8 {node} sees a" for node in NODES])
    assert site.steps(job) == 2


def test_stagectl_inside_a_job(site: Site) -> None:
    script = f"{STAGECTL} plan {A}; {STAGECTL} stage {A}; {STAGECTL} status"
    job = site.sbatch(script, TWO)
    assert job.wait().exit_code == "0:0"
    would = r"stage: /nvme/a: 2\.9 MiB would move from /shared/a to n\[1-2\] \(2 nodes\) \(absent\)"
    row = rf"n\[1-2\] +/nvme/a +2\.9 MiB +\d+ s ago +ready +job {job.id} +/shared/a +{job.id}"
    room = r"/nvme: \S+ .iB( to \S+ .iB)? free of .*"
    check_lines(
        job.output(), would, staged("a", ALL), r"NODE +DST +SIZE +STAGED .*", row,
        r"1 file, 2 copies, 5\.7 MiB in all", room,
    )  # fmt: skip


def test_simultaneous_sruns_in_one_allocation_do_not_block_each_other(site: Site) -> None:
    one = f"(srun --overlap -N4 -n4 bash -c '{SEE_A}'; echo code $?)"
    commands = f"for i in 1 2 3 4 5; do {one} & done; wait"
    done = site.run(["salloc", "-N4", f"--stage={A}", "bash", "-c", commands], timeout=60)
    assert done.stdout.count("code 0") == 5
    assert done.stdout.count(" sees a") == 20


def test_simultaneous_sruns_may_stage_different_files(site: Site) -> None:
    one = "(srun --overlap -N3 -n3 --stage={} bash -c '{}'; echo code $?)"
    script = f"{one.format(A, SEE_A)} & {one.format(B, SEE_B)} & wait"
    job = site.sbatch(script, "-N3")
    assert job.wait().exit_code == "0:0"
    output = job.output()
    assert (output.count("code 0"), output.count(" sees a"), output.count(" sees b")) == (2, 3, 3)


def test_a_command_in_a_step_of_one_node_stages_to_all_nodes_of_the_job(site: Site) -> None:
    """Slurm names the node of the step alone there; from within another job, that job's nodes."""
    job = site.sbatch("sleep 60", "-N3", "-w", "n[2-4]")
    job.wait_for(lambda record: record["JobState"] == "RUNNING")
    step = f"srun --jobid={job.id} --overlap -N1 -w n2"
    nodes = "n[2-4] (3 nodes)"
    try:
        done = site.run(f"{step} bash -c '{STAGECTL} stage {A}; {STAGECTL} status'")
        summary, _, row, *_, room = done.stdout.splitlines()
        assert re.fullmatch(staged("a", nodes), summary)
        assert row.startswith("n[2-4]  /nvme/a ")
        assert room.endswith(" on n[2-4]")
        done = site.run(f"{step} --stage='{A};{B}' bash -c '{SEE_B}'")
        check_lines(shown(done), skipped("a", "n2"), staged("b", "n2"), "n2 sees b")
        within = f"{step} {STAGECTL} stage {A}"
        done = site.run(["salloc", "-N1", "-w", "n1", "bash", "-c", within])
        check_lines(done.stdout, skipped("a", nodes))
    finally:
        job.cancel()
        job.wait()


def test_a_job_that_stages_nothing_starts_no_helper(site: Site) -> None:
    job = site.sbatch("srun echo task", TWO)
    assert job.wait().exit_code == "0:0"
    check_lines(job.output(), *["task"] * 2)
    assert site.steps(job) == 1


@pytest.mark.usefixtures("_task_prolog")
def test_task_prolog_stages_the_scripts_lines_without_the_plugin(site: Site) -> None:
    use = f"srun bash -c 'sha256sum {COPY}; unsquashfs -l {COPY} | wc -l'"
    script = f"#!/bin/bash\n#STAGE {IMAGE}:{COPY}\n{use}\n"
    job = site.sbatch(script, TWO, "--ntasks-per-node=2")
    assert job.wait().exit_code == "0:0"
    summary, *used = job.output().splitlines()
    assert re.match(rf"stage: {COPY}: .* MiB from {IMAGE} to n\[1-2\] \(2 nodes\) in ", summary)
    assert used.count(f"{digest(site.shared('img.sqsh'))}  {COPY}") == 4
    assert len(set(used)) == 2
    with Watch(site.shared("img.sqsh")) as watch:
        job = site.sbatch(script, TWO)
        assert job.wait().exit_code == "0:0"
    assert (watch.opened, watch.read) == (0, 0)
    assert re.match(rf"stage: {COPY}: current on n\[1-2\] \(2 nodes\), nothing ", job.output())
    job = site.sbatch("echo plain", TWO)
    assert job.wait().exit_code == "0:0"
    assert job.output() == "plain\n"


@pytest.mark.usefixtures("_task_prolog")
def test_task_prolog_does_not_trust_the_environment_of_the_user(site: Site) -> None:
    script = f"#!/bin/bash\n#STAGE /shared/a:/nvme/a\n{SEE_A}\n"
    jobs = [
        site.sbatch(script, f"-w{node}", f"--export=PATH=/nonexistent,{variable}")
        for node, variable in zip(
            site.nodes, ("SLURM_STEP_ID=0", "SLURM_LOCALID=3", "LD_PRELOAD=/none.so"), strict=False
        )
    ]
    for node, job in zip(site.nodes, jobs, strict=False):
        job.wait()
        assert re.search(staged("a", node), job.output())


def test_without_the_plugin_a_missing_prefix_drains_no_node(site: Site) -> None:
    scripts = site.shared("scripts")
    scripts.mkdir()
    for name in ("task_prolog", "job_prolog", "job_epilog"):
        text = site.path("login", f"{PREFIX}/libexec/{name}").read_text()
        (scripts / name).write_text(text.replace(f"prefix={PREFIX}\n", "prefix=/opt/gone\n"))
        (scripts / name).chmod(0o755)
    with site.without_plugin("/shared/scripts"):
        assert site.sbatch("echo plain", TWO).wait().exit_code == "0:0"
        job = site.sbatch("#!/bin/bash\n#STAGE /shared/a:/nvme/a\necho started\n", TWO)
        assert job.wait().exit_code == "8:0"
        message, _ = job.output().splitlines()
        assert message == "stage: n1: /opt/gone/bin/python3 cannot be run; tell the administrator"
        site.assert_healthy()


@pytest.mark.usefixtures("_task_prolog")
def test_task_prolog_fails_the_job_with_the_message(site: Site) -> None:
    job = site.sbatch("#!/bin/bash\n#STAGE /shared/none:/nvme/a\necho started\n", TWO)
    state = job.wait()
    assert (state.state, state.exit_code) == ("FAILED", "4:0")
    *ours, slurms = job.output().splitlines()
    assert ours == [
        f"stage: n1: /shared/none: {MISSING}",
        "stage: the job's own program was not started (exit code 4)",
    ]
    # Before it are the node or, from 25.11 on, the time.
    assert slurms.endswith(" error: TaskProlog failed status=4")
