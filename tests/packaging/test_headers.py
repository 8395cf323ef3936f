"""packaging/install builds the plugin for the Slurm that is meant, or says why it does not.

Each case ends before anything is installed: the message names the headers that were found.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

INSTALL = Path(__file__).parents[2] / "packaging/install"


def slurm(prefix: Path, major: int, minor: int) -> Path:
    """Make the prefix of a Slurm with headers of one release. Return the folder of the headers."""
    (prefix / "include/slurm").mkdir(parents=True)
    (prefix / "include/slurm/spank.h").touch()
    number = f"#define SLURM_VERSION_NUMBER {major << 16 | minor << 8 | 3:#08x}\n"
    (prefix / "include/slurm/slurm_version.h").write_text(number)
    return prefix / "include"


def sinfo(prefix: Path, release: str) -> str:
    """Make a sinfo of another release than any headers here. Return a PATH with it."""
    (prefix / "bin").mkdir(parents=True)
    program = prefix / "bin/sinfo"
    program.write_text(f"#!/bin/sh\necho slurm {release}\n")
    program.chmod(0o755)
    return f"{prefix}/bin:/usr/bin:/bin"


def refused(tmp_path: Path, *options: str, hidden: str = "", **environment: str) -> str:
    """Return the message with which the installation ends; check that nothing was made."""
    prefix = tmp_path / "installed"
    line = [str(INSTALL), *options, str(prefix)]
    if hidden:  # in a mount namespace of its own
        line = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none {hidden} && "$@"', "sh", *line]
    given = {"PATH": "/usr/bin:/bin", **environment}
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=given)
    assert (done.returncode, done.stdout, prefix.exists()) == (1, "", False)
    return done.stderr.removeprefix("packaging/install: ")


def other_release(headers: Path, release: str, running: str) -> str:
    return (
        f"the headers in {headers} are of Slurm {release}, but sinfo is of slurm {running}: "
        "install its headers, or name its prefix by --slurm=DIR\n"
    )


def test_headers_are_those_of_the_sinfo_in_path(tmp_path: Path) -> None:
    path = sinfo(tmp_path / "slurm", "25.11.7")
    headers = slurm(tmp_path / "slurm", 24, 11)
    assert refused(tmp_path, PATH=path) == other_release(headers, "24.11", "25.11.7")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sinfo").symlink_to(tmp_path / "slurm/bin/sinfo")
    linked = f"{tmp_path}/bin:/usr/bin:/bin"
    assert refused(tmp_path, PATH=linked) == other_release(headers, "24.11", "25.11.7")


def test_headers_that_pkg_config_names_come_first(tmp_path: Path) -> None:
    path = sinfo(tmp_path / "slurm", "25.11.7")
    slurm(tmp_path / "slurm", 24, 11)
    headers = slurm(tmp_path / "other", 23, 2)
    (tmp_path / "slurm.pc").write_text(
        f"includedir={headers}\nName: slurm\nDescription: Slurm\nVersion: 23.02\n"
    )
    message = refused(tmp_path, PATH=path, PKG_CONFIG_PATH=str(tmp_path))
    assert message == other_release(headers, "23.02", "25.11.7")


def test_a_folder_without_headers_is_refused(tmp_path: Path) -> None:
    message = f"--slurm={tmp_path}: no slurm/spank.h there or in include/\n"
    assert refused(tmp_path, f"--slurm={tmp_path}") == message


@pytest.mark.root
def test_without_headers_nothing_is_installed_and_the_message_says_what_to_do(
    tmp_path: Path,
) -> None:
    assert refused(tmp_path, hidden="/usr/include") == (
        "Slurm's headers are missing, without which the plugin cannot be built: install them "
        "(Debian: libslurm-dev), name Slurm's prefix by --slurm=DIR, or give --without-plugin\n"
    )


def test_what_is_no_option_is_refused(tmp_path: Path) -> None:
    message = "--plugin is neither an option nor an absolute path; --help shows the options\n"
    assert refused(tmp_path, "--plugin") == message
