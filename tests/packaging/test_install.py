"""packaging/install says how it is called, and refuses a Python that will not do.

No case installs anything. Which headers it takes is in test_headers.py.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support.stagectl import Ran, environment, run

INSTALL = str(Path(__file__).parents[2] / "packaging/install")
SYSTEM = environment(PATH="/usr/bin:/bin")


def test_help_names_all_options() -> None:
    done = run([INSTALL, "--help"], variables=SYSTEM)
    assert (done.code, done.err) == (0, "")
    first, *lines = done.out.splitlines()
    assert first == "usage: packaging/install [OPTION]... PREFIX"
    assert [line.split()[0] for line in lines if line.startswith("  --")] == [
        "--enable", "--disable", "--upgrade", "--remove", "--slurm=DIR",
        "--without-plugin", "--wheels=DIR", "--destdir=DIR", "--download=DIR",
        "--help",
    ]  # fmt: skip


@pytest.mark.parametrize("options", [[], ["--without-plugin"]], ids=["nothing", "an option"])
def test_without_a_prefix_it_says_how_it_is_called(options: list[str]) -> None:
    text = run([INSTALL, "--help"], variables=SYSTEM).out
    assert run([INSTALL, *options], variables=SYSTEM) == Ran(2, "", text)


def refused(tmp_path: Path, python: str, *before: str) -> str:
    """Return why a Python is refused, by a line that begins with ``before``; nothing is made."""
    prefix = tmp_path / "installed"
    line = [*before, INSTALL, str(prefix)]
    done = run(line, variables={**SYSTEM, "PYTHON": python})
    assert (done.code, done.out, prefix.exists()) == (1, "", False)
    return done.err


@pytest.mark.root
def test_a_python_that_users_cannot_run_is_refused(tmp_path: Path) -> None:
    """That of the system, mounted beneath a folder that only root may enter."""
    with tempfile.TemporaryDirectory() as closed:
        usr = Path(closed, "usr")
        usr.mkdir()
        mount = f'mount --bind /usr {usr} && exec "$@"'
        said = refused(tmp_path, f"{usr}/bin/python3", "unshare", "-m", "sh", "-c", mount, "sh")
    assert said == (
        f"packaging/install: PYTHON={usr}/bin/python3 is closed to users, by the mode of "
        f"{closed}; set PYTHON=/usr/bin/python3.11\n"
    )


@pytest.mark.root
@pytest.mark.parametrize("way", ["copy in a closed folder", "link in a closed folder", "closed"])
def test_a_python_whose_file_users_cannot_reach_is_refused(tmp_path: Path, way: str) -> None:
    """Its packages are those of the system, which users can read."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "python3")
        if way.startswith("link"):
            python.symlink_to("/usr/bin/python3")
        else:
            shutil.copy("/usr/bin/python3", python)
        if way == "closed":
            os.chmod(folder, 0o755)
            python.chmod(0o700)
        said = refused(tmp_path, str(python))
        closed = python if way == "closed" else folder
        assert said == (
            f"packaging/install: PYTHON={python} is closed to users, by the mode of {closed}; set "
            "PYTHON=/usr/bin/python3.11\n"
        )


#: A Python that takes itself for an earlier one, as none is here.
EARLIER = """\
#!/usr/bin/python3
import sys
sys.version_info, sys.version = (3, 9, 21), "3.9.21 (main)"
sys.argv = sys.argv[1:]
exec(sys.argv.pop(1))
"""


def test_an_earlier_python_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "python3.9"
    python.write_text(EARLIER)
    python.chmod(0o755)
    assert refused(tmp_path, str(python)) == (
        f"packaging/install: PYTHON={python} is Python 3.9.21; set PYTHON to one of 3.11 or later\n"
    )
