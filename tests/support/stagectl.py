"""Run ``stagectl`` as a program of its own, with an environment that is no job's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

STAGECTL = [sys.executable, "-m", "stager"]


class Ran(NamedTuple):
    """Exit code, stdout, stderr."""

    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """A login's environment, and no job's."""
    home = str(Path.home())
    return {"PATH": os.environ["PATH"], "HOME": home, "LC_ALL": "C.UTF-8", "COLUMNS": "80", **more}


def run(
    line: list[str], folder: Path | None = None, variables: dict[str, str] | None = None
) -> Ran:
    """A program of its own, from the first instruction on."""
    done = subprocess.run(
        line, capture_output=True, text=True, check=False, timeout=30, stdin=subprocess.DEVNULL,
        cwd=folder, env=variables or environment(),
    )  # fmt: skip
    return Ran(done.returncode, done.stdout, done.stderr)
