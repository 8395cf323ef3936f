"""Find Slurm's commands: beside the srun that stage.toml names, else in the system's folders."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from stager.base.errors import LaunchError
from stager.base.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
        ended = _run(command, srun, seconds, os.environ)
    except TimeoutError:
        raise
    except OSError:
        return ""
    return "" if ended.returncode else ended.stdout


def complaint(
    command: Sequence[str], srun: str, seconds: float, environment: Mapping[str, str]
) -> str:
    """Return why a command of Slurm fails in an ``environment``, nothing if it does not."""
    try:
        ended = _run(command, srun, seconds, environment)
    except TimeoutError:
        return f"{command[0]} did not end in {seconds:.0f} s"
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    words = printable(" ".join(ended.stderr.split()))
    return (words or f"{command[0]} ended with {ended.returncode}") if ended.returncode else ""


def _run(
    command: Sequence[str | bytes], srun: str, seconds: float, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Raise TimeoutError, OSError."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False,
            env={**environment, "PATH": search_path(srun)},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
