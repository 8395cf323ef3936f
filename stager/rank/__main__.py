"""Start a rank: initialise MPI, run `rank.program`, finalise MPI, end the process.

``python -m stager.rank`` stands in for mpi4py's own runner, ``python -m mpi4py -m …``. Like that,
it ends all ranks when one raises an exception, because the others would wait for it for ever.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress

from stager.rank.start import end_with_parent, require_free_port, require_library

#: How the Open MPI of Debian and Ubuntu names itself.
_DEBIAN = "package: Debian OpenMPI"
#: The variable of ranks that were started without Slurm on several hosts (`launch.mpiexec`).
_ON_HOSTS = "STAGE_ON_HOSTS"


def main() -> None:
    """Initialise MPI and run the rank. End the ranks of all nodes if it raises."""
    end_with_parent()  # before the imports, which may take long from shared storage
    _tell_alive()
    gc.disable()  # imports leave no garbage, and to look for it takes a tenth of their time
    if os.getuid() == 0 or os.geteuid() == 0:
        from stager.rank.start import refuse_root  # which users do without

        refuse_root()
    require_library()
    if _node_name():  # simulated nodes need none
        require_free_port()
    import mpi4py

    # A single thread calls MPI, so the library needs no locks. It is finalised below.
    mpi4py.rc(initialize=False, finalize=False, thread_level="funneled")
    from mpi4py import MPI

    if _DEBIAN in MPI.Get_library_version():
        from stager.rank.start import pass_over_absent_fabrics  # not needed for other MPIs

        pass_over_absent_fabrics()
    if _node_name():
        from stager.rank.network import keep_from_going_astray  # not for simulated nodes

        keep_from_going_astray()
    MPI.Init_thread(MPI.THREAD_FUNNELED)
    try:
        # Imported after MPI_Init: the import takes a while, and MPI_Init waits for all ranks.
        from stager.rank import program as program

        gc.freeze()
        gc.enable()
        program.main()
    except BaseException as error:
        # Without any import, which may be what failed: the other ranks wait until this one aborts.
        try:
            sys.excepthook(type(error), error, error.__traceback__)
            _report_crash(error)
        finally:
            code = error.code if isinstance(error, SystemExit) else None
            MPI.COMM_WORLD.Abort(code if isinstance(code, int) and code else 1)
    else:
        with suppress(MPI.Exception, OSError):  # the outcome is agreed on and reported
            MPI.Finalize()
            sys.stdout.flush()
        os._exit(0)  # the kernel frees at once what takes the interpreter 10 ms to take down


def _tell_alive() -> None:
    """Print an event by which the launcher knows, if MPI does not start, that this rank has begun.

    It is written without any import, and by mpiexec's simulated nodes not at all.
    """
    if node := _node_name():
        os.write(1, f'{{"event": "alive", "node": "{node}"}}\n'.encode())


def _node_name() -> str:
    """Return the name of the node of this rank, nothing for a simulated one."""
    if _ON_HOSTS in os.environ:
        return os.uname().nodename
    return os.environ.get("SLURMD_NODENAME", "")


def _report_crash(error: BaseException) -> None:
    """Report the error to the launching process: MPI's own abort message hides the traceback."""
    from stager.base.events import event

    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    text = f"{type(error).__name__}: {error}"
    sys.stdout.write(event("crashed", node=node, error=text) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
