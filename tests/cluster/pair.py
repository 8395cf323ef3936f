"""One job of alice's and one of bob's on n1, whose folders lie where all users can make names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.cluster.site import STAGECTL

if TYPE_CHECKING:
    import subprocess

    from tests.cluster.cluster import Job
    from tests.cluster.site import Site

#: The node's disk, where the site makes a folder for each job.
PARENT = "/localscratch"


@dataclass(frozen=True)
class Pair:
    """The jobs, and the folder of each."""

    site: Site
    alice: Job
    bob: Job

    def job(self, user: str) -> Job:
        return self.alice if user == "alice" else self.bob

    def folder(self, user: str = "alice") -> str:
        return f"{PARENT}/{user}.{self.job(user).id}.0"

    def run(self, command: str, *words: str, user: str = "bob") -> tuple[int, str]:
        """Return the exit code of `stagectl` about the user's job, and what it says."""
        line = [STAGECTL, command, f"--job={self.job(user).id}", *words]
        return said(self.site.run(line, user=user, on="n1", check=False))

    def end(self) -> None:
        """Have both jobs end."""
        for job in (self.alice, self.bob):
            job.cancel()
            job.wait()


def said(done: subprocess.CompletedProcess[str]) -> tuple[int, str]:
    return done.returncode, done.stdout + done.stderr


def started(site: Site) -> list[Job]:
    """Make a new /shared/x, and return one running job of alice's and one of bob's."""
    site.run("rm -f /shared/x; head -c 3000000 /dev/urandom >/shared/x")
    jobs = [site.sbatch("sleep 600", "-wn1", user=user) for user in ("alice", "bob")]
    for job in jobs:
        job.wait_for(lambda record: record["JobState"] == "RUNNING")
    return jobs
