"""``stagectl gate``: what Slurm calls before a job starts."""

from __future__ import annotations

import socket

import pytest

from tests.support.desk import JOB, NOT_BENEATH, OUTSIDE, Desk, untimed
from tests.support.stagectl import Ran


def test_the_gate_stages_what_option_and_script_ask_for_in_task_prologs_language(
    job: Desk,
) -> None:
    first, second = job.folder / "nvme/first", job.folder / "nvme/second"
    (job.folder / "job.sh").write_text(f"#!/bin/sh\n#STAGE {job.source}:{second}\n")
    variables = {**JOB, "STAGE_DIRECTIVES": f"{job.source}:{first}"}
    ran = untimed(job.stagectl("gate", "--task-prolog", "--script", "job.sh", **variables))
    node = socket.gethostname()
    assert ran == Ran(
        0,
        "".join(
            f"print stage: {copy}: 293.0 KiB from {job.source} to {node} in T (R a node)\n"
            for copy in (first, second)
        ),
        "",
    )
    assert first.read_bytes() == second.read_bytes() == job.source.read_bytes()


def test_a_quiet_gate_prints_failures_alone(job: Desk) -> None:
    copy = job.folder / "nvme/copy"
    quiet = ("gate", "--quiet", "--script", "")
    done = job.stagectl(*quiet, **JOB, STAGE_DIRECTIVES=f"{job.source}:{copy}")
    assert done == Ran(0, "", "")
    assert copy.read_bytes() == job.source.read_bytes()
    failed = job.stagectl(*quiet, **JOB, STAGE_DIRECTIVES="/a:/b")
    refused = NOT_BENEATH.replace("/nvme", str(job.folder / "nvme"))
    error = "stage: the job's own program was not started (exit code 3)\n"
    assert failed == Ran(3, "", f"stage: {refused}\n{error}")


def test_the_gate_exports_names_and_the_lists_of_folders_that_are_spread(job: Desk) -> None:
    source = job.folder / "many"
    source.mkdir()
    (source / "file").write_bytes(b"12345")
    one, two = job.folder / "nvme/one", job.folder / "nvme/two"
    directives = f"{source}:{one},mode=shard,as=one;{source}:{two},mode=shard"
    variables = {**JOB, "STAGE_DIRECTIVES": directives}
    lists = f"export STAGE_SHARDS={one}/.stage-shards.tsv:{two}/.stage-shards.tsv"
    ran = job.stagectl("gate", "--task-prolog", **variables)
    exported = [f"export STAGE_one={one}", lists]
    assert (ran.code, ran.out.splitlines()[:-2], ran.err) == (0, exported, "")
    assert job.stagectl("gate", **variables).out.splitlines() == exported
    assert (one / ".stage-shards.tsv").read_text() == f"{socket.gethostname()}\t5\tfile\n"


def test_a_script_without_directives_starts_no_ranks(desk: Desk) -> None:
    script = "#!/bin/sh\n#STAGE\u00e9 /a /b\n# why\ncat <<end\n#STAGE /a:/b\nend\n"
    (desk.folder / "job.sh").write_text(script)
    # Outside of a job, where the ranks of a stage could not be started.
    for options in ([], ["--task-prolog"]):
        ran = desk.stagectl("gate", *options, "--script", "job.sh", STAGE_DIRECTIVES="")
        assert ran == Ran(0, "", "")


@pytest.mark.parametrize(
    ("directives", "variables", "code", "message"),
    [
        ("/a:/nvme/b", {}, 2, OUTSIDE),
        ("/a", JOB, 2, "no ':' between source and destination: write SRC:DST\n  /a\n    ^"),
        ("/a:/b", JOB, 3, NOT_BENEATH),
    ],
    ids=["outside of a job", "no directive", "not the site's"],
)  # fmt: skip
def test_a_gate_that_fails_says_why_and_that_the_program_was_not_started(
    desk: Desk, directives: str, variables: dict[str, str], code: int, message: str
) -> None:
    given = {**variables, "STAGE_DIRECTIVES": directives}
    plain = desk.stagectl("gate", **given)
    prolog = desk.stagectl("gate", "--task-prolog", **given)
    error = f"stage: {message}\nstage: the job's own program was not started (exit code {code})\n"
    assert plain == Ran(code, "", error)
    printed = "".join(f"print {line}\n" for line in error.splitlines())
    assert prolog == Ran(code, printed, "")
