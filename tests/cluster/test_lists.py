"""Lists of directives on their way from a command line or a script to the nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cluster.site import Site


def test_an_escaped_semicolon_does_not_separate_directives(site: Site) -> None:
    site.run("mkdir -p /shared/folder; echo kept > /shared/folder/file; echo step > /shared/a")
    # The pattern at the end of the job's one directive reads like the step's directive.
    listed = r"/shared/folder:/nvme/folder,exclude=x\;/shared/a:/nvme/a"
    script = "cat /nvme/folder/file; srun --stage=/shared/a:/nvme/a cat /nvme/a"
    job = site.sbatch(script, "-N1", f"--stage={listed}")
    assert job.wait().exit_code == "0:0", job.output()
    own = [line for line in job.output().splitlines() if not line.startswith("stage:")]
    assert own == ["kept", "step"]
