"""The test cluster with slurm-stage on it, installed as an administrator would install it.

By hand: ``python -m tests.cluster.site`` opens a shell there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster.cluster import (
    ACCOUNTS,
    LOGIN,
    SITE_ACCOUNT,
    SITE_BIN,
    Cluster,
    is_reached,
    locked,
    main,
)
from tests.cluster.processes import is_gate, is_helper, is_rank, is_srun, processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tests.cluster.cluster import Job, NvmeKind

REPOSITORY = Path(__file__).parents[2]
#: The copy of the repository as the machines of the cluster see it.
SOURCE = "/cluster/source"
#: Files that are not part of the repository.
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "build", ".*_cache", "__pycache__", "*.egg-info", ".hypothesis"
)
PREFIX = "/opt/slurm-stage"
PYTHON = f"{PREFIX}/bin/python3"
STAGECTL = f"{PREFIX}/bin/stagectl"
MPICH = "/opt/mpich"
IMAGE = "/shared/img.sqsh"
COPY = "/nvme/img.sqsh"
SHARED_ROOT = "/nvme/shared"
POLICY = 'roots = ["/nvme"]\n'
UNLIMITED = f"{POLICY}[cache]\nkeep_free = 0\nuser_limit = 0\n"
PLUGSTACK = f"required {PREFIX}/lib/spank_stage.so python={PYTHON} config=/etc/slurm/stage.toml\n"

#: Seconds that nothing takes, however busy the machine is, unless it waits for what does not come.
HANGS = 100

#: Removes the marks of jobs and the rooms of users from a node, with what is mounted there, but not
#: what slurmd made when it started: without the folder of the marks no job is marked.
_TAKE_AWAY = (
    "findmnt --noheadings --raw --output=TARGET | grep ^/run/slurm-stage/ | tac |"
    " xargs --no-run-if-empty umount --lazy; rm -rf /run/slurm-stage/jobs/* /run/slurm-stage/[0-9]*"
)


class Site(Cluster):
    """The cluster with slurm-stage, and what the tests need to look at it."""

    #: A folder in which the first cluster of a run keeps what it has installed, for the others.
    installed: Path | None = None

    def start(self, timeout: float = 180) -> None:
        """Start the cluster and install slurm-stage as an administrator does."""
        super().start(timeout)
        shutil.copytree(REPOSITORY, self.base / "source", ignore=_LEFT_OUT)
        self._install()
        link = f"ln -s {PREFIX}/bin/stagectl {SITE_BIN}/stagectl"
        self.run(f"mkdir -p {SITE_BIN}; {link}", user="root")
        self.write_policy(POLICY)
        self.write_plugstack(PLUGSTACK)
        self.restart_all_slurmd()  # slurmd runs the plugin's epilog only after a restart
        self._await(self._all_idle, "all nodes idle", timeout)

    def _install(self) -> None:
        """Install slurm-stage, or copy what was installed."""
        if not self.installed:
            self._install_anew()
            return
        self.installed.mkdir(exist_ok=True)
        kept, done = self.installed / "prefix", self.installed / "done"
        prefix = str(self.base) + PREFIX
        with locked(self.installed, fcntl.LOCK_EX):
            if done.exists():
                subprocess.run(["cp", "-a", kept, prefix], check=True)
            else:
                self._install_anew()
                subprocess.run(["cp", "-a", prefix, kept], check=True)
                done.touch()

    def _install_anew(self) -> None:
        line = [f"{SOURCE}/packaging/install", PREFIX]
        environment = {"PYTHON": "/usr/bin/python3"}
        said = self.run(line, user="root", env=environment, host_net=True, timeout=600)
        assert (said.stdout.count("\n"), said.stderr) == (2, "")

    def make_image(self) -> None:
        """Make a squashfs image of some 60 MB: the installed Python environment."""
        plain = ["-quiet", "-no-progress", "-no-duplicates", "-noD", "-noI", "-noF", "-noX"]
        line = ["mksquashfs", f"{self.base}{PREFIX}", f"{self.base}{IMAGE}", *plain]
        subprocess.run(line, check=True, capture_output=True)

    def install_mpich(self) -> None:
        """Install the MPICH that `make` fetches, beneath `MPICH`, on all nodes."""
        fetched, there = REPOSITORY / "build/mpich", self.base / MPICH[1:]
        (there / "bin").mkdir(parents=True, exist_ok=True)
        for name in ("mpiexec", "hydra_pmi_proxy"):
            shutil.copy(fetched / "bin" / name, there / "bin")
        but = shutil.ignore_patterns("python*")
        shutil.copytree(fetched / "lib", there / "lib", True, but, dirs_exist_ok=True)

    def write_policy(self, text: str) -> None:
        """Replace stage.toml."""
        self.write_config("stage.toml", text)

    @contextmanager
    def policy(self, text: str) -> Iterator[None]:
        """Use another stage.toml within a with block."""
        self.write_policy(text)
        try:
            yield
        finally:
            self.write_policy(POLICY)

    @contextmanager
    def nvme(self, node: str, kind: NvmeKind, size: str | None = None) -> Iterator[None]:
        """Give one node another disk, which is so small that users may fill it, unless the site has
        another stage.toml.
        """
        usual = self.path(LOGIN, "/etc/slurm/stage.toml").read_text() == POLICY
        with super().nvme(node, kind, size):
            if not usual:
                yield
                return
            with self.policy(UNLIMITED):
                yield

    @contextmanager
    def without_plugin(self, scripts: str = f"{PREFIX}/libexec") -> Iterator[None]:
        """Have slurm.conf name the scripts in this folder instead of the plugin."""
        self.write_plugstack("")
        self.reconfigure(
            f"TaskProlog={scripts}/task_prolog\nProlog={scripts}/job_prolog\n"
            f"Epilog={scripts}/job_epilog\nPrologFlags=Alloc,DeferBatch"
        )
        try:
            yield
        finally:
            self.write_plugstack(PLUGSTACK)
            self.reconfigure()

    @contextmanager
    def sharing(self) -> Iterator[str]:
        """Let the site's account stage for all users beneath a folder of its own."""
        for node in self.nodes:
            folder = self.path(node, SHARED_ROOT)
            folder.mkdir(mode=0o755)
            os.chown(folder, ACCOUNTS[SITE_ACCOUNT], ACCOUNTS[SITE_ACCOUNT])
        shared = f'[shared]\nowner = "{SITE_ACCOUNT}"\nroots = ["{SHARED_ROOT}"]\n'
        with self.policy(POLICY + shared):
            yield SHARED_ROOT

    def shared(self, name: str) -> Path:
        """Return the host's path of a file in /shared."""
        return self.path("login", f"/shared/{name}")

    def copy(self, node: str, path: str = COPY) -> Path:
        """Return the host's path of a node's copy."""
        return self.path(node, path)

    def empty_disks(self) -> None:
        """Remove everything from the nodes' disks, the records too."""
        for node in self.nodes:
            remove_all(self.path(node, "/nvme").iterdir())

    def leftovers(self) -> list[str]:
        """Return what outlived its job on any node: partial files, ranks, marks, users' rooms."""
        ranks = (each for each in processes(self) if is_rank(each) or is_srun(each))
        found = [f"{process.node}: {' '.join(process.words)}" for process in ranks]
        for node in self.nodes:
            partial = self.path(node, "/nvme").glob(".slurm-stage/*/partial/*")
            found += [f"{node}: {path.name}" for path in partial]
            marks = self.path(node, "/run/slurm-stage").glob("jobs/*")
            found += [f"{node}: job {mark.name}" for mark in marks]
            mounts = (self.path(node, "/").parent / "mountinfo").read_text()
            places = re.findall(r" (/run/slurm-stage/\S*) ", mounts)
            found += [f"{node}: {place} is mounted" for place in places]
        return found

    def left_behind(self, patience: float = 15) -> list[str]:
        """Return what is wrong after a test; nodes get ``patience`` seconds to become idle."""
        wrong = []
        try:
            self.assert_healthy(patience)
        except AssertionError as unhealthy:
            wrong.append(str(unhealthy))
        return wrong + self.leftovers()

    def take_away(self) -> None:
        """End and remove all that a test has left, so that the next one does not fail of it."""
        self.run("squeue --noheader --format=%A | xargs --no-run-if-empty scancel", user="root")
        for process in processes(self):
            if any(kind(process) for kind in (is_rank, is_srun, is_gate, is_helper)):
                process.kill()
        for node in self.nodes:
            self.run(_TAKE_AWAY, user="root", on=node)
        self.empty_disks()
        self.revive()

    def records(self, node: str) -> list[Path]:
        """Return the record files of a node."""
        return sorted(self.path(node, "/nvme").glob(".slurm-stage/*/records/*.json"))

    def steps(self, job: Job) -> int:
        """Return how many steps were launched for a job, not counting the batch step."""
        ids = {record["JobId"] for record in job.records()}
        launched = re.compile(rf"launch task StepId=({'|'.join(ids)})\.(\d+) ")
        logs = (self.base / "log").glob("slurmd-n*.log")
        return len({match[0] for log in logs for match in launched.finditer(log.read_text())})


def wait_until(reached: Callable[[], bool], seconds: float = 60) -> None:
    """Return when that is reached; AssertionError if it is not after so many seconds."""
    assert is_reached(reached, seconds, pause=0.1)


def remove_all(paths: Iterable[Path]) -> None:
    """Remove files and folders, with all that is in them."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def digest(path: Path) -> str:
    """Return the file's SHA-256, an independent check: the project's own digest is another."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main(Site))
