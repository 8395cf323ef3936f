"""A rank's process: how MPI starts in it, and that an exception in one rank ends them all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from stager.base.events import event
from stager.launch.environment import RANK
from stager.launch.mpiexec import folder_of_launcher, mpiexec_argv, mpiexec_environment

#: Replaces `stager.rank.program` by a program whose last rank raises while the others wait for it.
RAISES = """
import sys, types
import stager.rank
from stager.rank import __main__ as start
def main():
    from mpi4py import MPI
    print("thread level", MPI.Query_thread() == MPI.THREAD_FUNNELED, flush=True)
    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        {end}
    MPI.COMM_WORLD.Barrier()
stager.rank.program = sys.modules["stager.rank.program"] = types.SimpleNamespace(main=main)
start.main()
"""


def run_ranks(end: str) -> subprocess.CompletedProcess[str]:
    launcher = mpiexec_argv(3)[: -len(RANK)]
    with folder_of_launcher(is_shared_memory=True) as folder:
        environment = {**mpiexec_environment(folder), "OMPI_MCA_mpi_yield_when_idle": "1"}
        return subprocess.run(
            [*launcher, sys.executable, "-I", "-c", RAISES.format(end=end)],
            env={**os.environ, **environment},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip


def test_an_exception_in_one_rank_ends_all_of_them() -> None:
    done = run_ranks('raise RuntimeError("out of luck")')
    assert done.returncode == 1
    assert "RuntimeError: out of luck" in done.stderr
    crashed = event("crashed", node=socket.gethostname(), error="RuntimeError: out of luck")
    assert crashed in done.stdout.splitlines()


def test_a_surprise_in_a_thread_ends_all_ranks_too() -> None:
    start = "from stager.wire.ring import start_thread; start_thread(lambda: 1 / 0)"
    end = f"import time; {start}; time.sleep(30)"
    done = run_ranks(end)
    assert done.returncode != 0
    assert "ZeroDivisionError: division by zero" in done.stderr


def test_a_rank_that_can_import_nothing_more_still_ends_all() -> None:
    names = ("mpi4py.run", "stager.base.events", "traceback", "json")
    block = f"sys.modules.update(dict.fromkeys({names}))"
    done = run_ranks(f"{block}; raise ImportError('stale file handle')")
    assert done.returncode == 1
    assert "ImportError: stale file handle" in done.stderr


def test_a_thread_that_can_import_nothing_more_still_ends_all() -> None:
    block = "sys.modules.update(dict.fromkeys(('traceback',)))"
    start = "from stager.wire.ring import start_thread; start_thread(lambda: 1 / 0)"
    assert (
        run_ranks(
            f"{start.split(';')[0]}; {block};{start.split(';')[1]}; import time; time.sleep(30)"
        ).returncode
        != 0
    )


def test_an_exit_with_a_code_ends_all_of_them_with_it() -> None:
    assert run_ranks("sys.exit(5)").returncode == 5


def test_one_thread_calls_mpi_and_mpi_ends_with_the_process() -> None:
    done = run_ranks("pass")
    assert done.returncode == 0, done.stderr  # mpiexec's code were another without MPI_Finalize
    assert done.stdout.splitlines() == ["thread level True"] * 3


#: Modules that a rank whose copies are all current does without: each costs path look-ups on shared
#: storage, on all nodes at once.
NEEDLESS = {
    "pathlib", "pathspec", "queue", "random", "re2", "socket", "traceback", "backports.zstd",
    "stager.archive", "stager.tree", "stager.launch", "stager.store.space",
    "stager.store.removal", "stager.rank.file_transfer", "stager.rank.provision",
    "stager.rank.delivery", "stager.rank.guard", "stager.wire.ring", "stager.wire.transfer",
}  # fmt: skip
#: Prints the modules that a rank imports after MPI_Init.
IMPORTED = """
import sys, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
before = set(sys.modules)
import stager.rank.program
print(*set(sys.modules) - before, sep="\\n")
"""


def test_a_rank_imports_what_moves_data_only_when_data_moves() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", IMPORTED], capture_output=True, text=True, check=True
    )
    imported = set(done.stdout.splitlines())
    assert "stager.rank.steps" in imported
    assert imported & NEEDLESS == set()
