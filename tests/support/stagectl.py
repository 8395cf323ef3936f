"""Run stagectl, or another program, as a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

STAGECTL = [sys.executable, "-m", "stager"]


class Ran(NamedTuple):
    """A finished program's exit code, stdout and stderr."""

    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a login, outside of any job."""
    home = str(Path.home())
    return {"PATH": os.environ["PATH"], "HOME": home, "LC_ALL": "C.UTF-8", "COLUMNS": "80", **more}


def run(
    line: list[str], folder: Path | None = None, variables: dict[str, str] | None = None
) -> Ran:
    """Run a program to its end, for 30 s at most."""
    done = subprocess.run(
        line, capture_output=True, text=True, check=False, timeout=30, stdin=subprocess.DEVNULL,
        cwd=folder, env=variables or environment(),
    )  # fmt: skip
    return Ran(done.returncode, done.stdout, done.stderr)
