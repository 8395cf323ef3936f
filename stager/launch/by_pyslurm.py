"""Ask pyslurm about a job or the nodes, in a process of its own.

pyslurm ends the process that imports it where slurm.conf cannot be read, waits half a minute for a
controller that does not answer, and changes how libraries are loaded that come after it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any


def ask_pyslurm(*question: str, seconds: float) -> Any:
    """Return the answer to ``job ID``, a list of its nodes and their number, or ``nodes``, their
    states by name. Return None if pyslurm is not installed, fails or does not know.

    Raise TimeoutError if there is no answer within ``seconds``.
    """
    if find_spec("pyslurm") is None:
        return None
    isolated = ["-I"] if sys.flags.isolated else []
    try:
        done = subprocess.run(
            [sys.executable, *isolated, "-m", __name__, *question],
            capture_output=True, timeout=seconds, check=True,
        )  # fmt: skip
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _answer(kind: str, *job: str) -> Any:
    """Return what pyslurm says; None where it does not know the job, or lacks the call."""
    import pyslurm

    try:
        if kind == "job":
            record = pyslurm.Job.load(int(job[0]))
            return record.allocated_nodes, record.num_nodes
        known = pyslurm.Nodes.load()
        return {name: str(known[name].state) for name in known}
    except (AttributeError, pyslurm.RPCError):
        return None


if __name__ == "__main__":
    json.dump(_answer(*sys.argv[1:]), sys.stdout)
