"""A job with --stage finds its file on every node; the next job moves nothing."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from tests.cluster.site import COPY, IMAGE, STAGECTL, digest
from tests.cluster.watch import Watch

if TYPE_CHECKING:
    from tests.cluster.site import Site

ON_ALL = "n[1-4] (4 nodes)"
MIB = r"\d+\.\d MiB"
TIME = r"\d+\.\d s"
MOVED = rf"stage: {COPY}: {MIB} from {IMAGE} to n\[1-4\] \(4 nodes\) in {TIME} \({MIB}/s a node\)"
SKIPPED = rf"stage: {COPY}: current on n\[1-4\] \(4 nodes\), nothing moved \({MIB}, {TIME}\)"
STAGE = f"--stage={IMAGE}:{COPY}"

#: How the user's script uses the image on each node.
USE = f"""#!/bin/bash
srun bash -c 'sha256sum {COPY}; unsquashfs -l {COPY} | wc -l'
"""


def first_line(output: str) -> str:
    return output.splitlines()[0]


def test_the_file_is_on_every_node_before_the_first_line_of_the_script(site: Site) -> None:
    image = site.shared("img.sqsh")
    assert image.stat().st_size >= 32 << 20
    job = site.sbatch(USE, "-N4", STAGE)
    assert job.wait().exit_code == "0:0"
    summary, *used = job.output().splitlines()
    assert re.fullmatch(MOVED, summary)
    assert used.count(f"{digest(image)}  {COPY}") == 4
    listed = site.run(f"unsquashfs -l {IMAGE} | wc -l").stdout.strip()
    assert used.count(listed) == 4
    for node in site.nodes:
        facts, original = site.copy(node).stat(), image.stat()
        assert (facts.st_mtime_ns, facts.st_mode) == (original.st_mtime_ns, 0o100600)
        assert facts.st_uid == 5001


def test_the_second_job_moves_nothing_and_reads_nothing_of_the_source(site: Site) -> None:
    site.sbatch("true", "-N4", STAGE).wait()
    with Watch(site.shared("img.sqsh")) as watch:
        job = site.sbatch("echo started", "-N4", STAGE)
        assert job.wait().exit_code == "0:0"
    assert (watch.opened, watch.read) == (0, 0)
    summary, started = job.output().splitlines()
    assert re.fullmatch(SKIPPED, summary)
    assert started == "started"


def test_a_node_that_lacks_the_copy_gets_it_from_another_node(site: Site) -> None:
    site.sbatch("true", "-N4", STAGE).wait()
    site.copy("n3").unlink()
    before = {node: site.copy(node).stat().st_ino for node in ("n1", "n2", "n4")}
    with Watch(site.shared("img.sqsh")) as watch:
        job = site.sbatch("true", "-N4", STAGE)
        assert job.wait().exit_code == "0:0"
    assert (watch.opened, watch.read) == (0, 0)
    assert re.fullmatch(
        rf"stage: {COPY}: {MIB} from the copy on n1 to n3 in {TIME} \({MIB}/s a node\); "
        r"current on n\[1-2,4\] \(3 nodes\)\n",
        job.output(),
    )
    assert {node: site.copy(node).stat().st_ino for node in before} == before
    assert digest(site.copy("n3")) == digest(site.shared("img.sqsh"))


def test_a_replaced_source_goes_to_all_nodes(site: Site) -> None:
    site.run("head -c 5000000 /dev/urandom > /shared/data")
    site.sbatch("true", "-N4", "--stage=/shared/data:/nvme/data").wait()
    # The same size and time, but another inode.
    site.run("cp -p /shared/data /shared/new && printf x | dd of=/shared/new conv=notrunc "
             "&& touch -r /shared/data /shared/new && mv /shared/new /shared/data")  # fmt: skip
    job = site.sbatch("true", "-N4", "--stage=/shared/data:/nvme/data")
    assert job.wait().exit_code == "0:0"
    assert f"from /shared/data to {ON_ALL}" in job.output()
    assert {digest(site.copy(node, "/nvme/data")) for node in site.nodes} == {
        digest(site.shared("data"))
    }


REMEDY = (
    "it is kept: move it, delete it, choose another destination, or add the option "
    "replace\nstage: the job's own program was not started (exit code 6)\n"
)


def test_a_file_of_the_users_own_is_replaced_only_if_the_user_says_so(site: Site) -> None:
    site.run("head -c 5000000 /dev/urandom > /shared/data")
    site.run("echo mine > /nvme/data", on="n2")
    job = site.sbatch("true", "-N4", "--stage=/shared/data:/nvme/data")
    assert job.wait().exit_code == "6:0"
    assert job.output() == (f"stage: n2: /nvme/data is a plain file that was not staged; {REMEDY}")
    assert site.copy("n2", "/nvme/data").read_text() == "mine\n"
    assert not site.copy("n1", "/nvme/data").exists()
    plan = site.sbatch(f"{STAGECTL} plan /shared/data:/nvme/data", "-N4")
    assert plan.wait().exit_code == "6:0"
    assert "n2: /nvme/data is a plain file that was not staged" in plan.output()
    note = "what was not staged, or was changed since, was replaced"
    keep = "write what you want to keep elsewhere\n"
    job = site.sbatch("true", "-N4", "--stage=/shared/data:/nvme/data,replace")
    assert job.wait().exit_code == "0:0"
    assert job.output().endswith(f"stage: /nvme/data: note: on n2, {note}; {keep}")
    # A copy that was changed is not replaced either, but one that was only touched is.
    site.run("echo mine >> /nvme/data", on="n3")
    site.run("touch /nvme/data", on="n4")
    job = site.sbatch("true", "-N4", "--stage=/shared/data:/nvme/data")
    assert job.wait().exit_code == "6:0"
    assert job.output() == (
        f"stage: n3: /nvme/data is a plain file, changed since it was staged; {REMEDY}"
    )
    assert site.copy("n3", "/nvme/data").read_bytes().endswith(b"mine\n")
    site.run("truncate -s -5 /nvme/data", on="n3")
    job = site.sbatch("true", "-N4", "--stage=/shared/data:/nvme/data")
    assert job.wait().exit_code == "0:0"
    assert "from the copy on n1 to n[3-4] (2 nodes)" in job.output()
    assert "note:" not in job.output()


def test_validate_checksum_finds_and_repairs_damage_that_left_no_trace(site: Site) -> None:
    site.run("head -c 5000000 /dev/urandom > /shared/data")
    wish = "--stage=/shared/data:/nvme/data"
    site.sbatch("true", "-N4", wish).wait()
    damaged = site.copy("n2", "/nvme/data")
    facts = damaged.stat()
    with damaged.open("r+b") as file:
        file.seek(1234567)
        file.write(b"damage")
    os.utime(damaged, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    job = site.sbatch("true", "-N4", f"{wish},validate=checksum")
    assert job.wait().exit_code == "0:0"
    assert "from the copy on n1 to n2 in " in job.output()
    assert job.output().endswith(
        "stage: /nvme/data: note: on n2, the copy was damaged: its bytes were not those that were "
        "staged\n"
    )
    assert digest(damaged) == digest(site.shared("data"))


def test_a_damaged_copy_is_not_sent_on(site: Site) -> None:
    """Only reading it shows that n1's copy is damaged; then another copy is sent."""
    site.run("head -c 5000000 /dev/urandom > /shared/data")
    wish = "--stage=/shared/data:/nvme/data"
    site.sbatch("true", "-N2", "-w", "n[1-2]", wish).wait()
    facts = site.copy("n1", "/nvme/data").stat()
    with site.copy("n1", "/nvme/data").open("r+b") as file:
        file.write(b"damage")
    os.utime(site.copy("n1", "/nvme/data"), ns=(facts.st_atime_ns, facts.st_mtime_ns))
    job = site.sbatch("true", "-N3", "-w", "n[1-3]", wish)
    assert job.wait().exit_code == "0:0"
    assert "from the copy on n2 to n[1,3] (2 nodes) in " in job.output()
    assert {digest(site.copy(node, "/nvme/data")) for node in ("n1", "n2", "n3")} == {
        digest(site.shared("data"))
    }


def test_a_node_is_prepared_again_only_when_it_must_be(site: Site) -> None:
    note = site.path("n2", "/run/slurm-stage/5001.prepared")

    def staged_then_noted() -> tuple[int, list[str]]:
        assert site.sbatch("true", "-N4", STAGE).wait().exit_code == "0:0"
        return note.stat().st_mtime_ns, note.read_text().splitlines()[1:]

    first = staged_then_noted()
    assert first[1] == ["/nvme/.slurm-stage"]
    assert staged_then_noted() == first
    site.empty_disks()
    second = staged_then_noted()
    assert second[0] > first[0]
    for node in site.nodes:
        site.path(node, "/nvme/more").mkdir()
    with site.policy('roots = ["/nvme", "/nvme/more"]\n'):
        folders = ["/nvme/.slurm-stage", "/nvme/more/.slurm-stage"]
        assert staged_then_noted()[1] == folders
