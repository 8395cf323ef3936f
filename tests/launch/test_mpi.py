"""Which MPI plugin of Slurm starts the ranks, and which MPI library they load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stager.base.errors import LaunchError
from stager.launch import mpi
from stager.launch.mpi import choose_abi, choose_plugin, settle
from stager.request.policy import Launch, Policy

if TYPE_CHECKING:
    from pathlib import Path

OPEN_MPI, MPICH = "libmpi.so.40", "libmpi.so.12"
LISTING = r"MPI plugin types are...\n\tnone\n\tpmi2\n"


@pytest.mark.parametrize(
    ("plugins", "libraries", "expected"),
    [
        ("none pmi2 pmix pmix_v5", "openmpi", "pmix"),
        ("none pmi2 pmix pmix_v5", "mpich", "pmi2"),
        ("none pmi2 pmix pmix_v5", "mpich openmpi", "pmix"),
        ("none pmi2", "mpich openmpi", "pmi2"),
        ("none pmix_v4 pmix_v5", "openmpi", "pmix_v4"),
        ("none pmi2 pmix", "", "pmix"),
        ("none pmi2", "", "pmi2"),
        # MPICH may know PMIx, and nothing is known of other kinds.
        ("none pmix_v5", "mpich", "pmix_v5"),
        ("none pmi2 pmix", "impi", "pmix"),
        ("none pmi2", "impi", "pmi2"),
    ],
)
def test_the_plugin_is_one_that_may_start_a_library_of_the_node(
    plugins: str, libraries: str, expected: str
) -> None:
    assert choose_plugin(plugins.split(), libraries.split()) == expected


@pytest.mark.parametrize(
    ("plugins", "libraries", "here"),
    [
        ("pmi2 none", "openmpi", "(none, pmi2) fits the MPI library of this node (openmpi)"),
        ("none", "impi", "(none) fits the MPI library of this node (impi)"),
        ("none", "mpich openmpi", "(none) fits the MPI library of this node (mpich, openmpi)"),
        ("", "", "(none found) fits the MPI library of this node (none found)"),
    ],
)
def test_a_library_that_no_plugin_starts_is_named(plugins: str, libraries: str, here: str) -> None:
    with pytest.raises(LaunchError) as failed:
        choose_plugin(plugins.split(), libraries.split())
    assert failed.value.message == (
        f"no MPI plugin of Slurm {here}: Open MPI needs pmix, MPICH pmi2 or pmix; tell the "
        "administrator to install one that fits, or to name the plugin (mpi in [launch] of "
        "stage.toml)"
    )


@pytest.mark.parametrize(
    ("plugin", "libraries", "expected"),
    [
        ("pmix", {"openmpi", "mpich"}, "openmpi"),
        ("pmix_v5", {"openmpi", "mpich"}, "openmpi"),
        ("pmi2", {"openmpi", "mpich"}, "mpich"),
        ("pmi2", {"mpich"}, None),
        ("pmi2", {"openmpi"}, None),
        ("cray_shasta", {"openmpi", "mpich"}, None),
    ],
)
def test_of_several_libraries_the_ranks_load_the_one_of_the_plugin(
    plugin: str, libraries: set[str], expected: str | None
) -> None:
    assert choose_abi(plugin, libraries) == expected


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any MPI, and with a Slurm that has no plugins."""
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin/srun"
    srun.write_text(f"#!/bin/sh\n[ \"$*\" = --mpi=list ] && printf '{LISTING}'\n")
    srun.chmod(0o755)
    monkeypatch.setattr(mpi, "_LOADER_CACHE", str(tmp_path / "ld.so.cache"))
    monkeypatch.setattr(mpi, "_LOADER_FOLDERS", (f"{tmp_path}/system", f"{tmp_path}/none"))
    monkeypatch.setattr("sys.prefix", str(tmp_path / "python"))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    return tmp_path


def give(folder: Path, *files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        (folder / file).touch()


def settled(machine: Path, launch: Launch | None = None) -> tuple[str, dict[str, str]]:
    policy = Policy(roots=("/nvme",), launch=launch or Launch())
    found = settle(policy, f"{machine}/bin/srun").launch
    return found.mpi, dict(found.environment)


PLUGINS = ("libslurmfull.so", "mpi_none.so", "mpi_pmi2.so", "mpi_pmix.so", "task_none.so")


@pytest.mark.parametrize("folder", ["lib64/slurm", "lib/slurm", "lib/x86_64-linux-gnu/slurm-wlm"])
def test_plugins_are_found_beside_srun_and_libraries_where_the_loader_finds_them(
    machine: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi, "_TRIPLET", "x86_64-linux-gnu")
    give(machine / folder, *PLUGINS)
    assert settled(machine) == ("pmix", {})
    cache = machine / "ld.so.cache"
    cache.write_bytes(b"glibc-ld.so.cache1.1\0/usr/lib/libmpi.so.12\0/usr/lib/xlibmpi.so.40\0")
    assert settled(machine) == ("pmi2", {})
    cache.write_bytes(cache.read_bytes() + b"libmpi.so.40\0")
    assert settled(machine) == ("pmix", {"MPI4PY_MPIABI": "openmpi"})
    (machine / folder / "mpi_pmix.so").unlink()
    assert settled(machine) == ("pmi2", {"MPI4PY_MPIABI": "mpich"})


def test_a_link_to_a_library_of_another_name_is_found_though_the_cache_lacks_it(
    machine: Path,
) -> None:
    """As the libmpi.so.12 of Debian's MPICH, whose own name is libmpich.so.12."""
    give(machine / "lib/slurm", *PLUGINS)
    (machine / "lib/slurm/mpi_pmix.so").unlink()
    (machine / "ld.so.cache").write_bytes(b"/usr/lib/libmpich.so.12\0/usr/lib/libmpi.so.40\0")
    with pytest.raises(LaunchError, match=r"the MPI library of this node \(openmpi\)"):
        settled(machine)
    give(machine / "system", MPICH)
    assert settled(machine) == ("pmi2", {"MPI4PY_MPIABI": "mpich"})


def test_the_folder_that_slurm_conf_names_comes_first(machine: Path) -> None:
    give(machine / "lib/slurm", *PLUGINS)
    give(machine / "more", "mpi_pmi2.so")
    conf = f"ClusterName=c\n#PluginDir=/none\n plugindir = /none:{machine}/more\n"
    (machine / "slurm.conf").write_text(conf)
    assert settled(machine) == ("pmi2", {})


def test_srun_is_asked_where_no_folder_has_plugins(machine: Path) -> None:
    assert settled(machine) == ("pmi2", {})
    (machine / "bin/srun").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(LaunchError, match=r"no MPI plugin of Slurm \(none found\) fits"):
        settled(machine)


def test_what_the_site_names_stays(machine: Path) -> None:
    give(machine / "lib/slurm", *PLUGINS)
    give(machine / "mpi", OPEN_MPI, MPICH)
    paths = {"LD_LIBRARY_PATH": f":{machine}/none:{machine}/mpi"}
    assert settled(machine, Launch(mpi="pmi2", environment=paths)) == (
        "pmi2",
        {"MPI4PY_MPIABI": "mpich", **paths},
    )
    mpich = {"MPI4PY_MPIABI": "mpich", **paths}
    assert settled(machine, Launch(environment=mpich)) == ("pmi2", mpich)
    intel = {"MPI4PY_MPIABI": "impi", **paths}
    assert settled(machine, Launch(environment=intel)) == ("pmix", intel)
    library = {"MPI4PY_LIBMPI": "/opt/mpi/lib/libmpi.so", **paths}
    assert settled(machine, Launch(environment=library)) == ("pmix", library)
    assert settled(machine, Launch(mpi="cray_shasta")) == ("cray_shasta", {})


def test_a_library_that_is_a_python_package_is_the_only_one(machine: Path) -> None:
    give(machine / "lib/slurm", *PLUGINS)
    give(machine / "python/lib", MPICH)
    give(machine / "mpi", OPEN_MPI)
    paths = {"LD_LIBRARY_PATH": f"{machine}/mpi"}
    assert settled(machine, Launch(environment=paths)) == ("pmi2", paths)
