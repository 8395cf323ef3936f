"""A JobContext, a Policy and a StageRequest in; argv and environment of the ranks out; one `run`.

The ranks' environment is built from an allow-list: a job's own SLURM_, PMIX_ and OMPI_ variables
would shape a nested srun in ways that were meant for the user's program.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stager.errors import MPI_REMEDY, LaunchError
from stager.phases import Phase
from stager.report import Outcome
from stager.request import REQUEST_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stager.job import JobContext
    from stager.policy import Policy
    from stager.request import StageRequest

#: How the ranks are started by any launcher. -I shuts out the user's PYTHON* and site folder.
RANK = (sys.executable, "-I", "-m", "stager.start")

#: Tells the plugin in the nested srun that this step is the helper. Slurm takes it for the
#: plugin's hidden option --stage-helper, and passes over it where there is no such plugin.
HELPER_OPTION = "_SLURM_SPANK_OPTION_slurm_stage_stage_helper"
#: The same for whoever sees only the step's environment; its value is the job's id.
HELPER_SENTINEL = "STAGE_HELPER"

#: What a nested srun needs to find its job and controller, and nothing that shapes the step.
_KEPT = (
    "LANG", "LOGNAME", "TMPDIR", "TZ", "USER",
    "SLURM_CLUSTER_NAME", "SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES", "SLURM_NODE_ALIASES", "SLURM_STEPMGR", "SLURM_WORKING_CLUSTER",
)  # fmt: skip
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"

#: Simulated nodes share one machine's cores, and a demonstration may be root's.
LOCAL_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}

#: Lines of the launcher's own output that a failure's message repeats.
_TAIL = 12
#: Seconds of one wait for output; the kernel takes no endless number of them.
_LONGEST_WAIT = 3600.0


def srun_argv(job: JobContext, policy: Policy) -> list[str]:
    """The nested srun: one rank on each node of the job, beside whatever runs there.

    ``-n`` is spelled out against an inherited SLURM_NTASKS; ``--mem=0`` and ``--gres=none`` claim
    nothing that the job's own steps need; ``--cpu-bind=none`` lets a rank's threads use all CPUs.
    """
    count = str(job.node_count)
    return [
        policy.launch.srun, "--jobid", str(job.job), "--job-name=stage", "--quiet", "--overlap",
        f"--mpi={policy.launch.mpi}", "--export=ALL", "-N", count, "-n", count,
        "--ntasks-per-node=1", "--mem=0", "--gres=none", "--cpu-bind=none", "--chdir=/",
        "--kill-on-bad-exit=1", "--wait=30", "--input=none", *RANK,
    ]  # fmt: skip


def mpiexec_argv(count: int) -> list[str]:
    """``count`` ranks on this machine, by the MPI beside this Python where there is one."""
    embedded = _embedded()
    return [str(embedded) if embedded.exists() else "mpiexec", "-n", str(count), *RANK]


def _embedded() -> Path:
    """The mpiexec that the extra ``local`` installs beside this Python."""
    return Path(sys.executable).parent / "mpiexec"


def rank_environment(
    environment: Mapping[str, str], policy: Policy, request: StageRequest
) -> dict[str, str]:
    """The environment of launcher and ranks, the request in it. Raises UsageError if too long."""
    local = bool(request.local_root)
    kept = {name: environment[name] for name in _KEPT if name in environment}
    return {
        **kept,
        # Open MPI wants one, and would read settings there that are meant for the user's program.
        "HOME": "/",
        "PATH": _PATH,
        # Waiting ranks spin otherwise, on cores that readers and writers need.
        "OMPI_MCA_mpi_yield_when_idle": "1",
        # MPI_Init ends with a barrier. By Slurm's other kind, a tree, a rank may leave it before
        # the last has come (seen with 22.05): what it sends then crashes Open MPI there.
        "SLURM_PMIX_FENCE": "ring",
        **(LOCAL_ENVIRONMENT if local else {}),
        # Looking for networks costs a second that shared memory can do without.
        **({"OMPI_MCA_btl": "self,sm"} if local and _embedded().exists() else {}),
        **policy.launch.environment,
        HELPER_OPTION: "1",
        HELPER_SENTINEL: str(request.job),
        REQUEST_VARIABLE: request.to_json(),
    }


def run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    start_timeout: float,
    on_event: Callable[[dict[str, Any]], None],
) -> Outcome:
    """Start the ranks, pass their events on, and return the Outcome they agreed on.

    Its time is from the launch to the launcher's end.

    Raises LaunchError where the launcher cannot be started, no rank begins within
    ``start_timeout`` seconds, or the ranks end without an Outcome.
    """
    begun = time.monotonic()
    try:
        process = subprocess.Popen(
            argv, env=dict(environment), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        raise LaunchError(f"{argv[0]} cannot be started: {error.strerror}") from None
    except ValueError as error:  # a NUL or '=' where none can be
        raise LaunchError(f"{argv[0]} cannot be started: {error}") from None
    with process:
        listener = _Listener(process, time.monotonic() + start_timeout, on_event)
        try:
            outcome = listener.listen()
        except BaseException:
            _end(process)
            raise
        if listener.timed_out:
            _end(process)
    if outcome is None:
        raise LaunchError(_no_outcome(argv, process.returncode, listener, start_timeout))
    return _with_launch(outcome, listener.told - begun, time.monotonic() - listener.told)


def _with_launch(outcome: Outcome, until_told: float, since: float) -> Outcome:
    """The ranks' ``outcome`` with the launcher's own time before and after it, in seconds."""
    phases = {Phase.LAUNCH: max(0.0, until_told - outcome.seconds), **outcome.phases}
    phases[Phase.END] = phases.get(Phase.END, 0.0) + since
    return replace(outcome, phases=phases, seconds=sum(phases.values()))


def _no_outcome(argv: Sequence[str], code: int, listener: _Listener, start_timeout: float) -> str:
    launcher = os.path.basename(argv[0])
    ended = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    if listener.timed_out:
        problem = f"MPI did not start within {start_timeout:g} s; {MPI_REMEDY}"
    elif not listener.begun:
        problem = f"MPI did not start: {launcher} {ended}; {MPI_REMEDY}"
    else:
        why = listener.crash or f"{launcher} {ended}"
        problem = f"the ranks ended before the stage was done: {why}; submit again"
    return problem + "".join(f"\n  {line}" for line in listener.tail)


class _Listener:
    """Reads what the ranks and their launcher print, until all of it is said."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        deadline: float,
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._process = process
        self._deadline = deadline
        self._on_event = on_event
        #: The launcher's last words, whether a rank has begun, and whether that took too long.
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self.begun = False
        self.timed_out = False
        #: Why the first rank that failed unexpectedly did so.
        self.crash = ""
        #: When the Outcome came, on the monotonic clock.
        self.told = 0.0

    def listen(self) -> Outcome | None:
        """The Outcome, or None where the output ended, or the time to begin, without one."""
        outcome = None
        with selectors.DefaultSelector() as selector:
            for stream in (self._process.stdout, self._process.stderr):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, data=bytearray())
            while selector.get_map() and not self.timed_out:
                ready = selector.select(self._patience())
                self.timed_out = not self.begun and time.monotonic() >= self._deadline
                for key, _ in ready:
                    block = os.read(key.fd, 65536)
                    key.data.extend(block or b"\n")
                    if not block:
                        selector.unregister(key.fileobj)
                    *lines, rest = key.data.split(b"\n")
                    key.data[:] = rest
                    for line in lines:
                        outcome = self._hear(line.decode(errors="replace")) or outcome
        return outcome

    def _patience(self) -> float | None:
        left = self._deadline - time.monotonic()
        return None if self.begun else min(max(0.0, left), _LONGEST_WAIT)

    def _hear(self, line: str) -> Outcome | None:
        event = _as_event(line)
        if event is None:
            if line.strip():
                self.tail.append(line.rstrip())
            return None
        self.begun = True
        if event["event"] == "result":
            self.told = time.monotonic()
            return Outcome.from_json(event["outcome"])
        if event["event"] == "crashed":
            self.crash = self.crash or f"{event['node']}: {event['error']}"
            return None
        self._on_event(event)
        return None


def _as_event(line: str) -> dict[str, Any] | None:
    if line.startswith('{"event": '):
        with suppress(ValueError):
            event: dict[str, Any] = json.loads(line)
            return event
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher: politely first, so that it takes its ranks along."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
        return
    process.kill()
