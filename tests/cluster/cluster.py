"""A real Slurm cluster on one machine, for tests and by hand.

Starts a login node and compute nodes n1 to nN that run munged, slurmctld and slurmd in Linux
namespaces, and runs commands and jobs there as an ordinary user. The number of nodes and the kind
of their local disks are parameters. Needs root, Slurm, munge, iproute2 and util-linux.

Every daemon, mount, loop device and network link belongs to one process, PID 1 of the site's
namespaces. The kernel kills it when this process ends in any way, and everything else with it. The
only trace on the host's own disk is one base folder; the next start removes those of killed runs.

By hand: ``python3 tests/cluster/cluster.py --nodes 4`` opens a shell as alice on the login node.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Self, get_args

NvmeKind = Literal["folder", "tmpfs", "loop"]
Argv = str | Sequence[str | os.PathLike[str]]

LOGIN = "login"
USERS = {"alice": 5001, "bob": 5002, "carol": 5003}
# A further group of some of them.
PROJECT, PROJECT_MEMBERS = 6001, ("alice", "carol")
#: The site's account that stages for all users.
SITE_ACCOUNT = "stage"
ACCOUNTS = {**USERS, SITE_ACCOUNT: 5010}
MAX_NODES = 32
_CHECKOUT = Path(__file__).parents[2]
CPUS_PER_NODE = 16
SLURMCTLD_PORT = 6817
SLURMD_PORT = 6818
#: sshd wants to be called by its path.
SSHD, SSH_PORT = "/usr/sbin/sshd", 22
#: How far a stage is: "stage: /nvme/x: 1.0 GiB of 3.0 GiB, 33 %, 90.0 MiB/s, 22.0 s left", or what
#: the nodes do: "stage: n[1-2] are writing /nvme/x, 12.3 s since the start".
_PROGRESS = re.compile(
    r"^stage: (?:.*: .* of .*, \d+ %, (?:.*/s(?:, .* left)?|no data for .*)|"
    r"\S+ (?:(?:is|are) \w+ing .*|do(?:es)? not answer), .* since the start)\n",
    re.MULTILINE,
)
#: That the ranks were started again because of Slurm or MPI: rare, and at no test's wish.
_RESTARTED = re.compile(
    r"^stage: (?:Slurm lost a connection between the nodes|MPI does not start); "
    r"the staging starts again\n",
    re.MULTILINE,
)
BASE_PREFIX = "slurm-stage-cluster-"
NAMESPACES = ("--mount", "--net", "--uts", "--ipc", "--pid")
#: The last folder is for the site's own commands: /usr/local is the host's.
SITE_BIN = "/opt/site/bin"
LOGIN_PATH = f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{SITE_BIN}"
MUNGED_FILES = (
    "--key-file=/cluster/munge/munge.key",
    "--log-file=/cluster/log/munged.log",
    "--seed-file=/cluster/munge/munged.seed",
    "--pid-file=/cluster/munge/run/munged.pid",
    "--socket=/run/munge/munge.socket.2",
)
PROGRAMS = ("ip", "mkfs.ext4", "munged", "nsenter", "setpriv", "slurmctld", "slurmd", "unshare")
# The host's variables that a download as root needs.
HOST_NET_VARIABLES = re.compile(r"PIP_.*|.*_proxy|SSL_CERT_.*|REQUESTS_CA_BUNDLE", re.IGNORECASE)
# `scontrol show job -o` and the like: values may contain spaces, keys may contain / and :.
RECORD_FIELD = re.compile(r"([A-Z][\w/:]*)=(.*?)(?= [A-Z][\w/:]*=|\s*$)")
FAILED_STATES = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")
FINAL_STATES = frozenset({"COMPLETED", "BOOT_FAIL", "DEADLINE", *FAILED_STATES})

# MinJobAge keeps ended jobs in `scontrol show job` for longer than any test runs.
SLURM_CONF = """\
ClusterName=stage
SlurmctldHost=login(10.0.0.254)
SlurmUser=root
AuthType=auth/munge
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
PlugStackConfig=/etc/slurm/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=lscratch
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
JobRequeue=1
MinJobAge=3600
KillWait=5
MessageTimeout=30
TCPTimeout=10
JobCompType=jobcomp/filetxt
JobCompLoc=/cluster/log/jobcomp.log
SlurmctldDebug=info
SlurmdDebug=info
"""


class ClusterError(Exception):
    """The cluster did not start, or not restart after a change; shows the end of each log."""


class CommandFailed(AssertionError):
    """A command in the cluster failed, or ran too long (then `code` is None)."""

    def __init__(self, command: str, code: int | None, stdout: str, stderr: str) -> None:
        end = "did not end in time" if code is None else f"ended with {code}"
        super().__init__(f"{command}\n{end}\n--- stdout\n{stdout}\n--- stderr\n{stderr}")
        self.code = code
        self.stdout = stdout
        self.stderr = stderr


class Command(subprocess.Popen[str]):
    """A command inside the cluster. Signals reach it, not the local nsenter that waits for it."""

    def send_signal(self, sig: int) -> None:
        """Signal the command itself, but not its children."""
        if self.poll() is None:
            _signal(_children_by_parent().get(self.pid, [self.pid]), sig)

    def kill(self) -> None:
        """Kill the command and its children, which would keep its output open."""
        if self.poll() is None:
            _signal(_descendants(self.pid), signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class JobState:
    """How a job ended; `exit_code` is Slurm's code:signal, such as "5:0"."""

    state: str
    exit_code: str
    reason: str
    restarts: int


@dataclass(frozen=True)
class Job:
    """A submitted batch job or job array; `message` is what sbatch wrote to stderr."""

    cluster: Cluster
    id: str
    message: str

    def records(self) -> list[dict[str, str]]:
        """Return Slurm's records of the job: one, or one for each task of an array."""
        shown = self.cluster.run(["scontrol", "show", "job", "-o", self.id], user="root").stdout
        return [parse_record(line) for line in shown.splitlines() if line]

    def info(self) -> dict[str, str]:
        """Return the job's record; for an array, that of the first task that is not COMPLETED."""
        records = self.records()
        return next((r for r in records if r["JobState"] != "COMPLETED"), records[0])

    def wait(self, timeout: float = 180) -> JobState:
        """Wait until the job, with all tasks of an array, has ended; return its final state."""
        begun = time.monotonic()
        # To ask slurmctld takes a core for 10 ms, in which the job would get on.
        is_reached(self._is_logged, timeout)
        left = timeout - (time.monotonic() - begun)
        self.wait_for(lambda record: record["JobState"] in FINAL_STATES, left)
        info = self.info()
        return JobState(info["JobState"], info["ExitCode"], info["Reason"], int(info["Restarts"]))

    def _is_logged(self) -> bool:
        """Whether slurmctld has logged an end of the job; epilogs may run, or it is requeued."""
        log = self.cluster.base / "log/jobcomp.log"
        return log.exists() and f"JobId={self.id} " in log.read_text()

    def wait_for(self, wanted: Callable[[dict[str, str]], bool], timeout: float = 180) -> None:
        """Wait until `wanted` holds for all records; AssertionError after `timeout` seconds."""
        records: list[dict[str, str]] = []

        def reached() -> bool:
            records[:] = self.records()
            return all(map(wanted, records))

        if not is_reached(reached, timeout, pause=0.1):
            raise AssertionError(f"job {self.id}, after {timeout} s: {records}\n{self.output()}")

    def output(self) -> str:
        """Return the job's output so far; for an array, the output of all tasks in order.

        Lines that say how far a slow stage is are left out: a busy machine makes any stage slow.
        So are those that say that a start of the ranks failed by a fault of Slurm or MPI.
        """
        return _RESTARTED.sub("", _PROGRESS.sub("", self.written()))

    def written(self) -> str:
        """Return all that the job has written so far."""
        paths = [self.cluster.path(LOGIN, record["StdOut"]) for record in self.records()]
        return "".join(path.read_text() for path in paths if path.exists())

    def requeue(self) -> None:
        """Requeue the running job, and start it again in 3 s instead of two minutes."""
        self.cluster.run(["scontrol", "requeue", self.id], user="root")
        self.wait_for(lambda record: record["JobState"] == "PENDING")
        self.start_again()

    def start_again(self) -> None:
        """Start the requeued job in 3 s, also if Slurm holds it.

        Slurm revokes the credential of a job that starts within the second of its requeue.
        """
        self.cluster.run(["scontrol", "release", self.id], user="root")
        update = ["scontrol", "update", f"JobId={self.id}", "StartTime=now+3"]
        self.cluster.run(update, user="root")

    def cancel(self) -> None:
        """Cancel the job; raise CommandFailed if there is none."""
        self.cluster.run(["scancel", self.id], user="root")


class Cluster:
    """A cluster, as a context manager. Start it from the main thread: it ends with its thread.

    `nvme_size` is as in mount's ``size=``, such as "200M"; None means 1G for a loop mount and no
    limit for the others. `extra_conf` is appended to slurm.conf, where the later of two lines wins.
    `parent` holds the base folder, and with it the nodes' nvme folders of kind folder or loop.
    `checkout` is the folder from which servers run; like all of the machine's folders, the nodes
    have it read-only.
    """

    def __init__(
        self,
        nodes: int = 4,
        nvme: NvmeKind = "folder",
        nvme_size: str | None = None,
        extra_conf: str = "",
        *,
        parent: Path = Path("/var/tmp"),
        checkout: Path = _CHECKOUT,
    ) -> None:
        if not 1 <= nodes <= MAX_NODES:
            raise ValueError(f"{nodes} nodes: 1 to {MAX_NODES} are possible")
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self._nvme = (nvme, nvme_size)
        self._extra_conf = extra_conf
        self._parent = parent
        self._checkout = checkout
        self._base: Path | None = None
        self._base_lock = -1
        self._site: subprocess.Popen[bytes] | None = None
        self._pids: dict[str, int] = {}
        self._daemons: dict[str, Command] = {}
        self._commands: list[Command] = []
        self._over_nvme: dict[str, list[Path]] = {}
        #: More options for each slurmd that starts.
        self.slurmd_options: tuple[str, ...] = ()
        self._serial = itertools.count(1)

    # ---------------------------------------------------------------- start and stop

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def base(self) -> Path:
        """The base folder, mounted as /cluster on every machine of the cluster."""
        if self._base is None:
            raise ClusterError("the cluster is not running")
        return self._base

    def start(self, timeout: float = 180) -> None:
        """Start the cluster; ClusterError if a node is not idle after `timeout` seconds."""
        if self._base is not None:
            raise ClusterError("the cluster is running already")
        if threading.current_thread() is not threading.main_thread():
            raise ClusterError("start a cluster from the main thread: it ends with its thread")
        _check_host()
        self._base, self._base_lock = _claim_base(self._parent)
        try:
            with _umask(0o022):
                self._fill_base()
            self._start_namespaces(timeout)
            self._start_daemons()
            self._await(self._all_idle, "all nodes idle", timeout)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all processes and remove the base folder; do nothing if nothing runs."""
        if self._site is not None:
            first = _children_by_parent().get(self._site.pid, [self._site.pid])
            _signal(first, signal.SIGKILL)
        for command in (self._site, *self._daemons.values(), *self._commands):
            if command is not None:
                command.__exit__(None, None, None)  # closes its pipes and waits
        self._site = None
        self._pids.clear()
        self._daemons.clear()
        self._commands.clear()
        self._over_nvme.clear()
        if self._base is not None:
            _remove_tree(self._base)
            os.close(self._base_lock)
            self._base = None

    def _fill_base(self) -> None:
        for name in ("etc/slurm", "home", "images", "log", "munge/run", "opt", "ready", "shared"):
            (self.base / name).mkdir(parents=True)
        (self.base / "shared").chmod(0o1777)
        for name in [LOGIN, *self.nodes]:
            for folder in ("spool/slurmctld", "spool/slurmd", "nvme"):
                (self.base / "nodes" / name / folder).mkdir(parents=True)
            (self.base / "nodes" / name / "nvme").chmod(0o1777)
        shutil.copy(Path(__file__).with_name("namespaces.sh"), self.base)
        self._fill_home()
        self._fill_etc()
        self._fill_munge()

    def _fill_home(self) -> None:
        for user, uid in {"root": 0, **ACCOUNTS}.items():
            home = self.base / "home" / user
            home.mkdir(mode=0o755)
            os.chown(home, uid, uid)

    def _fill_etc(self) -> None:
        etc = self.base / "etc"
        users = [f"{user}:x:{uid}:{uid}::/home/{user}:/bin/bash" for user, uid in ACCOUNTS.items()]
        groups = [f"{user}:x:{uid}:" for user, uid in ACCOUNTS.items()]
        groups.append(f"project:x:{PROJECT}:{','.join(PROJECT_MEMBERS)}")
        hosts = ["127.0.0.1 localhost", f"10.0.0.254 {LOGIN}"]
        hosts += [f"10.0.0.{number} {name}" for number, name in enumerate(self.nodes, 1)]
        _write_lines(etc / "passwd", [*_lines_of("/etc/passwd"), *users])
        _write_lines(etc / "group", [*_lines_of("/etc/group"), *groups])
        # Slurm from 25.11 on holds the jobs with --export=NONE of a user without a line there.
        _write_lines(etc / "shadow", [f"{user}:*:::::::" for user in ("root", *ACCOUNTS)])
        (etc / "shadow").chmod(0o600)
        _write_lines(etc / "hosts", hosts)
        (etc / "slurm/slurm.conf").write_text(slurm_conf(self.nodes, self._extra_conf))
        (etc / "slurm/plugstack.conf").touch()

    def _fill_munge(self) -> None:
        folder = self.base / "munge"
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for path in (folder, folder / "run", key):
            shutil.chown(path, "munge", "munge")

    def _start_namespaces(self, timeout: float) -> None:
        die_with_us = ["setpriv", "--pdeathsig=KILL"]
        unshare = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        script = ["bash", str(self.base / "namespaces.sh")]
        arguments = ["site", str(self.base), str(len(self.nodes))]
        with self._log("namespaces") as log:
            # setpriv ends unshare when this thread ends; --kill-child ends PID 1 when unshare ends.
            # The pipe's end covers the moment before setpriv has begun.
            self._site = subprocess.Popen(
                [*die_with_us, *unshare, *script, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={"PATH": LOGIN_PATH, "LANG": "C.UTF-8", "CHECKOUT": str(self._checkout)},
                cwd="/",
                umask=0o022,
                start_new_session=True,
            )
        self._await(self._namespaces_ready, "namespaces", timeout)
        self._pids = self._find_pids(self._site.pid)

    def _namespaces_ready(self) -> bool:
        if self._site is None or self._site.poll() is not None:
            raise ClusterError(f"building the namespaces failed\n{self.logs()}")
        return all((self.base / "ready" / name).exists() for name in [LOGIN, *self.nodes])

    def _find_pids(self, site: int) -> dict[str, int]:
        """Return the PID, on the host, of each machine's PID 1."""
        (login,) = _children_by_parent()[site]
        pids = {LOGIN: login}
        for pid in _descendants(login):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if command[:3] == ["bash", "/cluster/namespaces.sh", "node"]:
                    pids.setdefault(command[3], pid)  # parents come before children
        return pids

    def _start_daemons(self) -> None:
        self._start_daemon("munged", LOGIN, ["munged", "--foreground", *MUNGED_FILES], "munge")
        socket = self.path(LOGIN, "/run/munge/munge.socket.2")
        self._await(socket.exists, "munged's socket", 30)
        self._start_daemon("slurmctld", LOGIN, ["slurmctld", "-D"])
        self._await(lambda: self._listens(LOGIN, SLURMCTLD_PORT), "slurmctld", 30)
        for node in self.nodes:
            if self._nvme[0] != "folder":
                self.remount_nvme(node, *self._nvme)
            self._start_slurmd(node)

    def _start_slurmd(self, node: str, *options: str) -> None:
        line = ["slurmd", "-D", "-N", node, *self.slurmd_options, *options]
        self._start_daemon(f"slurmd-{node}", node, line)

    def _start_daemon(self, name: str, on: str, argv: Sequence[str], user: str = "root") -> None:
        line = self.enter_argv(argv, user, on, "/")
        with self._log(name) as log:
            daemon = _spawn(line, login_environment(user), subprocess.DEVNULL, log)
        self._daemons[name] = daemon

    def _stop_daemon(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        daemon.terminate()
        try:
            daemon.wait(30)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def _log(self, name: str) -> IO[str]:
        return (self.base / "log" / f"{name}.log").open("a")

    def _listens(self, machine: str, port: int) -> bool:
        sockets = Path(f"/proc/{self._pids[machine]}/net/tcp").read_text()
        listening = rf"^ *\d+: \w+:{port:04X} \w+:0000 0A "  # the state LISTEN is 0A
        return re.search(listening, sockets, re.MULTILINE) is not None

    def _await(self, reached: Callable[[], bool], what: str, timeout: float) -> None:
        if not is_reached(lambda: bool(self._ended()) or reached(), timeout):
            raise ClusterError(f"not within {timeout} s: {what}\n{self.logs()}")
        if ended := self._ended():
            raise ClusterError(f"{', '.join(ended)} ended by itself\n{self.logs()}")

    def _ended(self) -> list[str]:
        return [name for name, daemon in self._daemons.items() if daemon.poll() is not None]

    # ---------------------------------------------------------------- commands

    def run(
        self,
        argv: Argv,
        *,
        user: str = "alice",
        on: str = LOGIN,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        check: bool = True,
        timeout: float = 180,
        input: str | None = None,  # noqa: A002 - as in subprocess.run
        host_net: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, or a string for bash, as a user on the login node or a node.

        It starts in the user's home with the environment of a fresh login and `env`. With
        `host_net` it keeps the host's network, for downloads into the cluster's /opt.
        """
        line = self.enter_argv(argv, user, on, cwd, host_net=host_net)
        command = _spawn(line, login_environment(user, env, host_net=host_net))
        try:
            stdout, stderr = command.communicate(input, timeout)
        except subprocess.TimeoutExpired:
            command.kill()
            raise CommandFailed(_shown(argv, user, on), None, *command.communicate()) from None
        except BaseException:
            command.kill()
            command.wait()
            raise
        if check and command.returncode:
            raise CommandFailed(_shown(argv, user, on), command.returncode, stdout, stderr)
        return subprocess.CompletedProcess(argv, command.returncode, stdout, stderr)

    def popen(
        self,
        argv: Argv,
        *,
        user: str = "alice",
        on: str = LOGIN,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Command:
        """Start a command in the background, with pipes for stdin, stdout and stderr.

        The caller ends it; `stop` kills it otherwise.
        """
        command = _spawn(self.enter_argv(argv, user, on, cwd), login_environment(user, env))
        self._commands.append(command)
        return command

    def enter_argv(
        self,
        argv: Argv,
        user: str = "alice",
        on: str = LOGIN,
        cwd: str | None = None,
        *,
        host_net: bool = False,
    ) -> list[str]:
        """Return the host's command line that runs `argv` as `user` on the machine `on`."""
        namespaces = [option for option in NAMESPACES if not (host_net and option == "--net")]
        enter = ["nsenter", f"--target={self._pids[on]}", *namespaces, "--"]
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--"]
        there = ["env", f"--chdir={cwd or home_of(user)}", "--"]
        words = ["bash", "-c", argv] if isinstance(argv, str) else [os.fspath(a) for a in argv]
        return [*enter, *become, *there, *words]

    def path(self, machine: str, path: str | os.PathLike[str]) -> Path:
        """Return the host's path of a machine's file; absolute symlinks resolve on the host."""
        return Path(f"/proc/{self._pids[machine]}/root") / os.fspath(path).lstrip("/")

    @contextlib.contextmanager
    def sshd(self, *nodes: str) -> Iterator[None]:
        """Run sshd on these nodes within a with block; alice's key logs her in on all machines."""
        self._make_ssh_keys()
        try:
            for node in nodes:
                self.start_sshd(node)
            yield
        finally:
            for node in self.nodes:
                self.stop_sshd(node)

    def start_sshd(self, node: str) -> None:
        """Start sshd on a node, within a block of `sshd`."""
        self.run(["mkdir", "-p", "-m", "755", "/run/sshd"], user="root", on=node)
        options = ("HostKey=/cluster/ssh/host", "UsePAM=no", "PidFile=none", "MaxStartups=100")
        given = [word for option in options for word in ("-o", option)]
        self._start_daemon(f"sshd-{node}", node, [SSHD, "-D", "-e", "-f", "/dev/null", *given])
        self._await(lambda: self._listens(node, SSH_PORT), f"sshd on {node}", 30)

    def stop_sshd(self, node: str) -> None:
        """End a node's sshd, if it runs."""
        if f"sshd-{node}" in self._daemons:
            self._stop_daemon(f"sshd-{node}")

    def _make_ssh_keys(self) -> None:
        host, home = self.base / "ssh", self.base / "home/alice/.ssh"
        if host.exists():
            return
        make = "ssh-keygen -q -t ed25519 -N '' -f"
        self.run(f"mkdir -m 700 /cluster/ssh; {make} /cluster/ssh/host", user="root")
        make = f"{make} .ssh/id_ed25519; cp .ssh/id_ed25519.pub .ssh/authorized_keys"
        self.run(f"mkdir -m 700 .ssh; {make}")
        kind, key = (host / "host.pub").read_text().split()[:2]
        hosts = ",".join((*self.nodes, *map(self.address, self.nodes)))
        (home / "known_hosts").write_text(f"{hosts} {kind} {key}\n")

    def address(self, node: str) -> str:
        """Return the node's address."""
        return f"10.0.0.{self.nodes.index(node) + 1}"

    # ---------------------------------------------------------------- jobs

    def sbatch(
        self,
        script: str,
        *options: str,
        user: str = "alice",
        env: Mapping[str, str] | None = None,
    ) -> Job:
        """Submit a script, or shell commands without a first line ``#!``, from the user's home.

        CommandFailed, with sbatch's own message, if it is refused.
        """
        uid = ACCOUNTS.get(user, 0)
        text = script if script.startswith("#!") else f"#!/bin/bash\n{script}\n"
        path = f"{home_of(user)}/job-{next(self._serial)}.sh"
        outside = self.base / path.lstrip("/")
        outside.write_text(text)
        os.chown(outside, uid, uid)
        command = ["sbatch", "--parsable", f"--output={home_of(user)}/job-%j.out", *options, path]
        done = self.run(command, user=user, env=env)
        return Job(self, done.stdout.strip().partition(";")[0], done.stderr)

    # ---------------------------------------------------------------- state of Slurm

    def node_states(self) -> dict[str, str]:
        """Return the state of each node as sinfo prints it, such as "idle", "drained", "down*"."""
        lines = self.run(["sinfo", "--noheader", "--Node", "--format=%N %T"], user="root").stdout
        return dict(line.split() for line in lines.splitlines())

    def assert_healthy(self, timeout: float = 15) -> None:
        """AssertionError, with Slurm's reasons, unless all nodes are idle within `timeout` s."""
        if self._ended() or not is_reached(self._all_idle, timeout):
            reasons = self.run(["sinfo", "--list-reasons", "--long"], user="root").stdout
            states = f"nodes: {self.node_states()}, daemons that ended: {self._ended()}"
            raise AssertionError(f"{states}\n{reasons}")

    def resume(self) -> None:
        """Bring back the nodes that are drained or down."""
        for node, state in self.node_states().items():
            if re.match("drain|down|fail", state):
                update = ["scontrol", "update", f"NodeName={node}", "State=RESUME"]
                self.run(update, user="root")

    def revive(self, timeout: float = 60) -> None:
        """Start the slurmds that have ended, and bring back the nodes that are not idle."""
        for node in self.nodes:
            if f"slurmd-{node}" in self._ended():
                self._start_slurmd(node)

        def idle() -> bool:
            self.resume()
            return self._all_idle()

        self._await(idle, "all nodes idle", timeout)

    def _all_idle(self) -> bool:
        return list(self.node_states().values()) == ["idle"] * len(self.nodes)

    # ---------------------------------------------------------------- changes

    def reconfigure(self, extra_conf: str = "", *, restart: bool = False) -> None:
        """Replace the extra lines of slurm.conf; on return all daemons have read the new file.

        `scontrol reconfigure` returns before the slurmds have read it, hence their restart. They
        restart first: slurmctld marks a slurmd as down that is absent while it reconfigures. Some
        settings slurmctld reads only at a `restart`.
        """
        self.write_config("slurm.conf", slurm_conf(self.nodes, extra_conf))
        self.restart_all_slurmd()
        if restart:
            self.restart_slurmctld()
        else:
            self.run(["scontrol", "reconfigure"], user="root")

    def write_plugstack(self, text: str) -> None:
        """Replace plugstack.conf; commands and job steps read it when they start."""
        self.write_config("plugstack.conf", text)

    def write_config(self, name: str, text: str) -> None:
        """Replace a file of /etc/slurm when no epilog is reading it; nobody reads half of it."""
        self.await_epilogs()
        path = self.base / "etc/slurm" / name
        fresh = path.with_name(f"{name}.new")
        fresh.write_text(text)
        fresh.rename(path)

    def await_epilogs(self) -> None:
        """Wait, 30 s at most, for the epilogs of jobs: srun and salloc end before them."""
        squeue = ["squeue", "--noheader", "--states=COMPLETING"]
        is_reached(lambda: self.run(squeue, user="root", check=False).stdout == "", 30)

    def restart_slurmd(self, node: str) -> None:
        """Restart one slurmd, as a package upgrade does: running jobs go on."""
        self._restart_slurmds([node])

    def restart_all_slurmd(self) -> None:
        """Restart all slurmds at once."""
        self._restart_slurmds(self.nodes)

    def _restart_slurmds(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            self._stop_daemon(f"slurmd-{node}")
        for node in nodes:
            self._start_slurmd(node)
        self._await(
            lambda: all(self._listens(node, SLURMD_PORT) for node in nodes), "slurmd's port", 30
        )

    def restart_slurmctld(self) -> None:
        """Restart slurmctld, as a package upgrade does: jobs are in its saved state."""
        self._stop_daemon("slurmctld")
        self._start_daemon("slurmctld", LOGIN, ["slurmctld", "-D"])
        self._await(lambda: self._listens(LOGIN, SLURMCTLD_PORT), "slurmctld", 30)

    @contextlib.contextmanager
    def rebooting(self, node: str) -> Iterator[None]:
        """Reboot a node: end all of its processes and empty /run, /tmp and /dev/shm.

        slurmd starts at the end of the with block, and tells that the node was rebooted.
        """
        daemon = self._daemons.pop(f"slurmd-{node}")
        # The first process ends, and with it the namespaces, when the sleep ends that it waits for.
        kept = [self._pids[node], *self._sleeping(node)]
        _signal((pid for pid in self._inside(node) if pid not in kept), signal.SIGKILL)
        daemon.wait()
        environment = {"CHECKOUT": str(self._checkout)}
        script = ["bash", "/cluster/namespaces.sh", "reboot"]
        self.run(script, user="root", on=node, env=environment)
        try:
            yield
        finally:
            self._start_slurmd(node, "-b")
            self._await(lambda: self._listens(node, SLURMD_PORT), "slurmd's port", 30)

    def _sleeping(self, node: str) -> list[int]:
        """Return the PID of the sleep that a node's first process waits for."""
        children = _children_by_parent().get(self._pids[node], [])
        found = []
        for pid in children:
            with contextlib.suppress(OSError):  # a process of a job may end meanwhile
                if Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\0infinity\0":
                    found.append(pid)
        return found

    def _inside(self, node: str) -> Iterator[int]:
        """Yield the PIDs of all processes of a node."""
        own = os.readlink(f"/proc/{self._pids[node]}/ns/pid")
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(folder / "ns/pid") == own:
                    yield int(folder.name)

    def remount_nvme(self, node: str, kind: NvmeKind, size: str | None = None) -> None:
        """Mount an empty disk over a node's /nvme; job steps that start afterwards see it."""
        backing = self.base / "images" / f"{node}-{next(self._serial)}"
        commands = nvme_commands(kind, size, f"/cluster/images/{backing.name}")
        self.run(f"set -e\n{commands}", user="root", on=node)
        self._over_nvme.setdefault(node, []).append(backing)

    def restore_nvme(self, node: str) -> None:
        """Undo the last `remount_nvme`, even if processes still use the disk."""
        backing = self._over_nvme[node].pop()
        self.run(["umount", "--lazy", "/nvme"], user="root", on=node)
        if backing.is_dir():
            shutil.rmtree(backing)
        else:
            backing.unlink(missing_ok=True)

    @contextlib.contextmanager
    def nvme(self, node: str, kind: NvmeKind, size: str | None = None) -> Iterator[None]:
        """Give one node another disk within a with block."""
        self.remount_nvme(node, kind, size)
        try:
            yield
        finally:
            self.restore_nvme(node)

    def logs(self, lines: int = 30) -> str:
        """Return the end of every daemon's log."""
        paths = sorted((self.base / "log").glob("*.log"))
        return "\n".join(f"==> {p.name}\n{_tail(p, lines)}" for p in paths)


# -------------------------------------------------------------------- configuration


def slurm_conf(nodes: Sequence[str], extra: str = "") -> str:
    """Return slurm.conf; each node has more cores and memory in it than the machine.

    Jobs may ask for a share of its disk, which is a number for Slurm (--gres=lscratch:40).
    """
    names = f"n[1-{len(nodes)}]"
    cores = f"CPUs={CPUS_PER_NODE} CoresPerSocket={CPUS_PER_NODE}"
    node = f"NodeName={names} {cores} RealMemory=65536 Gres=lscratch:1000"
    partition = f"PartitionName=main Nodes={names} Default=YES OverSubscribe=YES MaxTime=INFINITE"
    return f"{SLURM_CONF}{node} State=UNKNOWN\n{partition} State=UP\n{extra}\n"


def nvme_commands(kind: NvmeKind, size: str | None, backing: str) -> str:
    """Return shell commands that mount an empty disk over /nvme, stored at `backing`."""
    if kind == "tmpfs":
        limit = f",size={size}" if size else ""
        return f"mount -t tmpfs -o mode=1777{limit} nvme /nvme"
    if kind == "loop":
        # No journal and no reserved blocks, so that a user can fill almost `size`.
        make = "mkfs.ext4 -q -m 0 -O ^has_journal -E lazy_itable_init=0"
        return (
            f"truncate --size={size or '1G'} {backing}\n{make} {backing}\n"
            f"mount -o loop {backing} /nvme\nchmod 1777 /nvme"
        )
    return f"mkdir {backing}\nchmod 1777 {backing}\nmount --bind {backing} /nvme"


def login_environment(
    user: str, env: Mapping[str, str] | None = None, *, host_net: bool = False
) -> dict[str, str]:
    """Return a fresh login's environment plus `env`; `host_net` adds proxy and pip settings."""
    wanted = HOST_NET_VARIABLES.fullmatch
    inherited = {k: v for k, v in os.environ.items() if host_net and wanted(k)}
    login = {"HOME": home_of(user), "USER": user, "LOGNAME": user, "SHELL": "/bin/bash"}
    return {**inherited, **login, "PATH": LOGIN_PATH, "LANG": "C.UTF-8", **(env or {})}


def home_of(user: str) -> str:
    """Return a user's home: /home/root for root, / for the users of daemons."""
    return f"/home/{user}" if user in ACCOUNTS or user == "root" else "/"


def parse_record(line: str) -> dict[str, str]:
    """Return the key=value pairs of one line of `scontrol show ... -o`."""
    return dict(RECORD_FIELD.findall(line))


def shown(done: subprocess.CompletedProcess[str]) -> str:
    """Return what srun or salloc printed: the program's output, and what is said of stages."""
    assert "stage: " not in done.stdout
    said = (line for line in done.stderr.splitlines(keepends=True) if line.startswith("stage: "))
    return done.stdout + "".join(said)


def _shown(argv: Argv, user: str, on: str) -> str:
    words = argv if isinstance(argv, str) else shlex.join(os.fspath(word) for word in argv)
    return f"{user}@{on}$ {words}"


# -------------------------------------------------------------------- processes


def _spawn(
    line: Sequence[str],
    env: Mapping[str, str],
    stdin: int = subprocess.PIPE,
    output: int | IO[str] = subprocess.PIPE,
) -> Command:
    return Command(
        line,
        stdin=stdin,
        stdout=output,
        stderr=output,
        env=env,
        text=True,
        cwd="/",
        umask=0o022,
        start_new_session=True,
    )


def _children_by_parent() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            stat = (folder / "stat").read_text()
            # The name, up to the last ')', may hold any character; state and parent follow it.
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    return children


def _descendants(pid: int) -> list[int]:
    children = _children_by_parent()
    found = list(children.get(pid, []))
    for child in found:
        found.extend(children.get(child, []))
    return found


def _signal(pids: Iterable[int], sig: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)


def is_reached(reached: Callable[[], bool], timeout: float, pause: float = 0.05) -> bool:
    """Return whether that is reached within so many seconds; look every ``pause`` seconds."""
    deadline = time.monotonic() + timeout
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


# -------------------------------------------------------------------- files


def _check_host() -> None:
    if os.geteuid() != 0:
        raise ClusterError("a cluster needs root")
    if missing := [name for name in PROGRAMS if not shutil.which(name, path=LOGIN_PATH)]:
        raise ClusterError(f"not installed here: {', '.join(missing)}")


def _claim_base(parent: Path) -> tuple[Path, int]:
    """Make a base folder with a lock that marks it as in use; remove those of killed runs.

    The lock on `parent` keeps others from removing the new folder before it is locked.
    """
    with locked(parent, fcntl.LOCK_EX):
        for left in parent.glob(f"{BASE_PREFIX}*"):
            with (
                contextlib.suppress(BlockingIOError, FileNotFoundError),  # its run ends now
                locked(left, fcntl.LOCK_EX | fcntl.LOCK_NB),
            ):
                _remove_tree(left)
        base = Path(tempfile.mkdtemp(prefix=BASE_PREFIX, dir=parent))
        base.chmod(0o755)
        lock = os.open(base, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return base, lock


@contextlib.contextmanager
def locked(folder: Path, operation: int) -> Iterator[None]:
    """Lock a folder as ``flock`` does, for a with block."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, operation)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def _remove_tree(folder: Path) -> None:
    """Remove a folder into which processes that are being killed may still write."""

    def gone() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    is_reached(gone, 10)


def _lines_of(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))


def _tail(path: Path, lines: int) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


# -------------------------------------------------------------------- by hand


def main(kind: type[Cluster]) -> int:
    """Start a cluster and open a shell, or run a command, on its login node."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--nvme", choices=get_args(NvmeKind), default="folder")
    parser.add_argument("--nvme-size", metavar="SIZE", help="such as 200M")
    parser.add_argument("--extra-conf", default="", metavar="TEXT", help="more lines of slurm.conf")
    parser.add_argument("--as", dest="user", choices=["root", *ACCOUNTS], default="alice")
    parser.add_argument("command", nargs="*", help="instead of a shell")
    args = parser.parse_args()
    with kind(args.nodes, args.nvme, args.nvme_size, args.extra_conf) as cluster:
        line = cluster.enter_argv(args.command or ["bash"], args.user)
        environment = login_environment(args.user, {"TERM": os.environ.get("TERM", "dumb")})
        # Ctrl-C goes to the program in the shell, which would inherit SIG_IGN, but no handler.
        signal.signal(signal.SIGINT, lambda *_: None)
        return subprocess.call(line, env=environment)


if __name__ == "__main__":
    sys.exit(main(Cluster))
