"""The test cluster itself: what it offers to tests, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.cluster import LOGIN, Cluster, ClusterError, CommandFailed, JobState, NvmeKind

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.nightly

START_AND_SLEEP = """
import sys, time
from pathlib import Path
from tests.cluster.cluster import Cluster
with Cluster(2, parent=Path(sys.argv[1])) as cluster:
    cluster.sbatch("sleep 1000").wait_for(lambda record: record["JobState"] == "RUNNING")
    print(cluster.path("login", "/"), cluster.path("n2", "/"), flush=True)
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(4) as cluster:
        yield cluster


@pytest.fixture(params=["/tmp", "/var/tmp", "/root"])
def checkout(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A checkout in a folder that is a node's own, or is the machine's."""
    with tempfile.TemporaryDirectory(prefix="slurm-stage-", dir=request.param) as folder:
        checkout = Path(folder, "checkout")
        (checkout / "stager").mkdir(parents=True)
        (checkout / "stager/module").write_text("kept\n")
        yield checkout


def namespaces_of(pid: str) -> set[str]:
    """Return the process's namespaces; none if it is a zombie or gone."""
    found = set()
    for kind in ("mnt", "net", "pid"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
    return found


def processes_in(namespaces: set[str]) -> list[str]:
    """Return the PIDs of all processes on the host that are in one of these namespaces."""
    pids = (path.name for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if namespaces_of(pid) & namespaces]


def cluster_namespaces(*roots: Path) -> set[str]:
    """Return the namespaces of the machines with these roots, without the host's own."""
    own = namespaces_of("self")
    return {name for root in roots for name in namespaces_of(root.parts[2])} - own


def test_a_job_runs_on_all_nodes_as_its_user(cluster: Cluster) -> None:
    job = cluster.sbatch("srun sh -c 'echo \"$(hostname) $(id -un) $(id -Gn)\"'", "-N4", user="bob")
    assert job.wait() == JobState("COMPLETED", "0:0", "None", 0)
    assert sorted(job.output().splitlines()) == [f"n{i} bob bob" for i in (1, 2, 3, 4)]


def test_a_failed_job_keeps_its_exit_code(cluster: Cluster) -> None:
    job = cluster.sbatch("exit 5")
    assert job.wait() == JobState("FAILED", "5:0", "NonZeroExitCode", 0)
    cluster.assert_healthy()


def test_an_array_ends_with_its_failed_task(cluster: Cluster) -> None:
    job = cluster.sbatch("echo $SLURM_ARRAY_TASK_ID; exit $SLURM_ARRAY_TASK_ID", "--array=0-2,0")
    assert job.wait().state == "FAILED"
    assert sorted(job.output().split()) == ["0", "1", "2"]


def test_a_requeued_job_runs_again(cluster: Cluster) -> None:
    again = 'echo run; [ -n "$SLURM_RESTART_COUNT" ] || sleep 1000'
    job = cluster.sbatch(again, "--open-mode=append")
    job.wait_for(lambda record: record["JobState"] == "RUNNING")
    job.requeue()
    assert job.wait() == JobState("COMPLETED", "0:0", "None", 1)


def test_a_cancelled_job(cluster: Cluster) -> None:
    job = cluster.sbatch("sleep 1000")
    job.wait_for(lambda record: record["JobState"] == "RUNNING")
    job.cancel()
    assert job.wait().state == "CANCELLED"


def test_a_refused_job_shows_what_sbatch_says(cluster: Cluster) -> None:
    with pytest.raises(CommandFailed, match="invalid partition specified: nowhere"):
        cluster.sbatch("true", "--partition=nowhere")


@pytest.mark.parametrize("folder", ["/tmp", "/nvme", "/dev/shm"])
def test_each_node_has_its_own(cluster: Cluster, folder: str) -> None:
    cluster.run(f"echo mine > {folder}/private", on="n1")
    assert cluster.path("n1", f"{folder}/private").read_text() == "mine\n"
    for machine in ("n2", LOGIN):
        assert not cluster.path(machine, f"{folder}/private").exists()
    assert not Path(folder, "private").exists()


def test_nothing_that_a_node_does_reaches_the_machines_files(checkout: Path) -> None:
    module, name = checkout / "stager/module", f"{checkout.parent.name}.made"
    folders = [path for path in Path("/").iterdir() if path.is_dir() and not path.is_symlink()]
    made = [path / name for path in (*folders, checkout, module.parent) if path != Path("/proc")]
    destroy = f"rm -rf {checkout}; echo changed >{module}; chmod 600 {module}; mv {checkout} /run"
    try:
        with Cluster(1, checkout=checkout) as cluster:
            for machine in (LOGIN, "n1"):
                touch = ["touch", *map(str, made)]
                cluster.run(touch, user="root", on=machine, check=False)
                cluster.run(destroy, user="root", on=machine, check=False)
            cluster.run("touch /tmp/lost /run/lost /dev/shm/lost", user="root", on="n1")
            with cluster.rebooting("n1"):
                left = cluster.run("ls -d /tmp/lost /run/lost /dev/shm/lost", on="n1", check=False)
                assert left.stdout == ""
                shown = cluster.run(["cat", str(module)], user="root", on="n1")
                assert shown.stdout == "kept\n"
        assert [path for path in made if path.exists()] == []
    finally:
        for path in made:
            path.unlink(missing_ok=True)
    assert sorted(checkout.rglob("*")) == [module.parent, module]
    assert (module.read_text(), module.stat().st_mode) == ("kept\n", 0o100644)


@pytest.mark.parametrize("folder", ["/shared", "/home/alice"])
def test_all_machines_share(cluster: Cluster, folder: str) -> None:
    cluster.run(f"echo ours > {folder}/common", on="n1")
    for machine in (LOGIN, *cluster.nodes):
        assert cluster.path(machine, f"{folder}/common").read_text() == "ours\n"


@pytest.mark.parametrize("kind", ["tmpfs", "loop"])
def test_a_small_disk_is_full_on_its_node_alone(cluster: Cluster, kind: NvmeKind) -> None:
    fill = "srun sh -c 'head -c 60M /dev/zero 2>/dev/null > /nvme/big || echo full on $(hostname)'"
    with cluster.nvme("n3", kind, "50M"):
        job = cluster.sbatch(fill, "-N4")
        assert job.wait().state == "COMPLETED"
        assert job.output() == "full on n3\n"
    assert not cluster.path("n3", "/nvme/big").exists()
    assert cluster.path("n2", "/nvme/big").stat().st_size == 60 << 20
    cluster.assert_healthy()


def test_reconfiguring_adds_and_removes_a_task_prolog(cluster: Cluster) -> None:
    prolog = cluster.path(LOGIN, "/shared/prolog")
    prolog.write_text("#!/bin/sh\necho print from the prolog\n")
    prolog.chmod(0o755)
    cluster.reconfigure("TaskProlog=/shared/prolog")
    with_prolog = cluster.sbatch("true")
    with_prolog.wait()
    cluster.reconfigure()
    without = cluster.sbatch("true")
    without.wait()
    assert (with_prolog.output(), without.output()) == ("from the prolog\n", "")


def test_a_running_job_survives_a_restart_of_slurmd(cluster: Cluster) -> None:
    job = cluster.sbatch("sleep 2; echo done", "-w", "n2")
    job.wait_for(lambda record: record["JobState"] == "RUNNING")
    cluster.restart_slurmd("n2")
    assert job.wait().state == "COMPLETED"
    assert job.output() == "done\n"


def test_a_command_that_takes_too_long_is_killed_with_its_children(cluster: Cluster) -> None:
    with pytest.raises(CommandFailed, match="did not end in time"):
        cluster.run("sleep 1234 & sleep 1234", on="n1", timeout=0.5)
    assert cluster.run("pgrep -x sleep -a | grep 1234", on="n1", check=False).stdout == ""


def test_a_signal_reaches_the_command(cluster: Cluster) -> None:
    command = cluster.popen("trap 'echo caught; exit 3' TERM; echo ready; read x", on="n1")
    assert command.stdout is not None
    assert command.stdout.readline() == "ready\n"
    command.terminate()
    assert command.communicate() == ("caught\n", "")
    assert command.returncode == 3


def loop_devices() -> str:
    """Return losetup's list: other clusters may have loop devices, too."""
    return subprocess.check_output(["losetup", "--all"], text=True)


def test_stop_leaves_nothing_behind(tmp_path: Path) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    cluster = Cluster(2, "loop", "20M", parent=tmp_path)
    cluster.start()
    namespaces = cluster_namespaces(*(cluster.path(name, "/") for name in (LOGIN, "n1", "n2")))
    cluster.sbatch("sleep 1000").wait_for(lambda record: record["JobState"] == "RUNNING")
    cluster.popen("sleep 1000", on="n2")
    assert len(namespaces) == 9
    assert processes_in(namespaces)
    images = [image.stat() for image in cluster.path(LOGIN, "/cluster/images").iterdir()]
    loops = [f"[{image.st_dev}]:{image.st_ino} " for image in images]
    assert [loop in loop_devices() for loop in loops] == [True, True]
    cluster.stop()
    cluster.stop()
    assert processes_in(namespaces) == []
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert [loop in loop_devices() for loop in loops] == [False, False]
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_ends_its_processes_and_the_next_removes_its_base(tmp_path: Path) -> None:
    command = [sys.executable, "-c", START_AND_SLEEP, str(tmp_path)]
    here = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=here) as run:
        assert run.stdout is not None
        namespaces = cluster_namespaces(*map(Path, run.stdout.readline().split()))
        assert len(namespaces) == 6
        run.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while processes_in(namespaces) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_in(namespaces) == []
    (left,) = tmp_path.iterdir()
    with Cluster(1, parent=tmp_path) as cluster:
        assert list(tmp_path.iterdir()) == [cluster.base]
    assert not left.exists()


def test_a_start_leaves_the_base_of_a_running_cluster_alone(cluster: Cluster) -> None:
    with Cluster(1, parent=cluster.base.parent) as other:
        assert other.base.exists()
    assert cluster.base.exists()
    cluster.assert_healthy()


def test_a_slurmd_that_does_not_start_is_an_error_with_its_log() -> None:
    with Cluster(1) as broken:
        broken.write_plugstack("required /nowhere.so\n")
        with pytest.raises(ClusterError, match=r"slurmd-n1 ended(?s:.*)/nowhere\.so"):
            broken.restart_slurmd("n1")
        with pytest.raises(AssertionError, match="slurmd-n1"):
            broken.assert_healthy()
