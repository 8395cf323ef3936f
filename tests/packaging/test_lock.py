"""What an administrator installs as root is locked: each package by its version and its hashes."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
PACKAGING = REPOSITORY / "packaging"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
NEEDED = {
    "requirements.lock": PROJECT["project"]["dependencies"],
    "build.lock": PROJECT["build-system"]["requires"],
    "docs/requirements.lock": (PACKAGING / "docs/requirements.in").read_text().splitlines(),
}


def is_for_this_python(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """The version and the hashes of each package in a lock, by its name."""
    text = (PACKAGING / name).read_text().replace("\\\n", " ")
    found: dict[str, tuple[str, list[str]]] = {}
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            text, *hashes = re.split(r"\s+--hash=", line.partition("#")[0].rstrip())
            assert all(re.fullmatch("sha256:[0-9a-f]{64}", one) for one in hashes), line
            requirement = Requirement(text)
            if is_for_this_python(requirement):
                version = str(requirement.specifier).removeprefix("==")
                found[canonicalize_name(requirement.name)] = version, hashes
    return found


@pytest.mark.parametrize("name", NEEDED)
def test_a_lock_has_each_dependency_in_a_version_that_fits_and_with_hashes(name: str) -> None:
    lock = locked(name)
    for needed in filter(is_for_this_python, map(Requirement, NEEDED[name])):
        version, _ = lock[canonicalize_name(needed.name)]
        assert needed.specifier.contains(version), f"make lock: {needed}, but {version} is locked"
    assert [package for package, (_, hashes) in lock.items() if not hashes] == []


def test_a_lock_is_complete_and_so_needs_no_dependencies_resolved() -> None:
    """The packages are installed without their dependencies, so the lock must have those too."""
    lock = locked("requirements.lock")
    for package in lock:
        for needed in map(Requirement, metadata.requires(package) or []):
            if is_for_this_python(needed):
                version, _ = lock[canonicalize_name(needed.name)]
                assert needed.specifier.contains(version), f"{package} needs {needed}"
