"""Find Slurm's commands: beside the srun that stage.toml names, else in the system's folders."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from stager.base.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The system's folders.
FOLDERS = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin")


def search_path(srun: str) -> str:
    """Return the folders in which Slurm's commands are looked for, as in PATH.

    ``srun`` is that of stage.toml. The last are the process's own, where the plugin adds those of
    the Slurm that runs it (gate.c); root may have them from a user, and does without.
    """
    named = [os.path.dirname(srun)] if "/" in srun else []
    own = os.environ.get("PATH", "").split(":") if os.geteuid() else []
    absolute = [folder for folder in own if folder.startswith("/")]
    return ":".join(dict.fromkeys([*named, *FOLDERS, *absolute]))


def find_srun(srun: str) -> str:
    """Return the path of the srun that stage.toml calls ``srun``. Raise LaunchError."""
    path = search_path(srun)
    if found := shutil.which(srun, path=path):
        return found
    if "/" in srun:
        problem = f"{srun}, which stage.toml names, is not there or cannot be run"
        remedy = "correct srun in [launch]"
    else:
        problem = f"{srun} is in none of the folders {path.replace(':', ', ')}"
        remedy = 'name it in stage.toml (srun = "/PATH/srun" in [launch])'
    raise LaunchError(
        f"{problem}; tell the administrator to {remedy}", os.environ.get("SLURMD_NODENAME")
    )


def answer(command: Sequence[str | bytes], srun: str, seconds: float) -> str:
    """Return what a command of Slurm prints, nothing if it fails.

    Raise TimeoutError if it takes longer than ``seconds``.
    """
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=True,
            env={**os.environ, "PATH": search_path(srun)},
        ).stdout  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    except (OSError, subprocess.SubprocessError):
        return ""
