"""The facts are those of this machine, and another node's are only taken if they are facts."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stager.base import paths
from stager.base.codec import codec_of
from stager.node.agent import Facts
from stager.node.facts import (
    ABSENT,
    UNSEEN,
    AbsentPlugin,
    NodeFacts,
    Place,
    PluginLine,
    _private_folders,
    mpi_library,
    node_facts,
    own_scripts,
    place,
    site_facts,
)
from tests.support.disks import ext4, xfs
from tests.support.users import as_ordinary_user, ordinary_home

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.disks import Disk


@pytest.fixture
def plugstack(tmp_path: Path) -> Path:
    """A plugstack.conf whose folder of further files names the plugin."""
    (tmp_path / "plugstack.conf.d").mkdir()
    (tmp_path / "plugstack.conf.d/stage.conf").write_text(
        "# required /old/spank_stage.so\noptional /usr/lib/first.so\n"
        f"required {tmp_path}/spank_stage.so "
        "python=/opt/bin/python3 config=/etc/stage.toml # ours\noptional /usr/lib/other.so\n"
    )
    (tmp_path / "spank_stage.so").write_bytes(
        b"\x7fELF\0slurm-stage 1.2.3\0slurm-stage for Slurm 0x180b05\0more"
    )
    path = tmp_path / "plugstack.conf"
    path.write_text("include plugstack.conf.d/*.conf\ninclude plugstack.conf\n")
    return path


def facts(tmp_path: Path, plugstack: str = "") -> NodeFacts:
    return node_facts(
        Facts(
            (str(tmp_path),),
            (f"{tmp_path}/all",),
            (str(tmp_path), f"{tmp_path}/for-users"),
            f"{tmp_path}/stage.toml",
            plugstack,
            scripts=(f"{tmp_path}/job_prolog",),
            textfile=f"{tmp_path}/none/stage.prom",
            shared_driver=f"{tmp_path}/driver",
            shared_folder=str(tmp_path),
        )
    )


def test_the_facts_are_those_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "stage.toml").write_bytes(b"roots = []")
    seen = facts(tmp_path)
    assert seen.digest == hashlib.sha256(b"roots = []").hexdigest()
    assert seen.prefix == sys.prefix
    assert seen.roots == [Place(str(tmp_path), os.getuid(), tmp_path.stat().st_mode)]
    assert seen.records == [Place(f"{tmp_path}/.slurm-stage", ABSENT, 0)]
    assert seen.scripts == [Place(f"{tmp_path}/job_prolog", ABSENT, 0)]
    assert seen.metrics == Place(f"{tmp_path}/none", ABSENT, 0)
    assert len(seen.code) == 64
    assert seen.destinations == [Place(f"{tmp_path}/for-users", ABSENT, 0)]
    assert seen.shared_roots == [Place(f"{tmp_path}/all", ABSENT, 0)]
    assert seen.shared_fs == [Place(f"{tmp_path}/driver", ABSENT, 0), *seen.roots]
    wanted = {f"{tmp_path}/stage.toml", f"{tmp_path}/driver"}
    assert wanted | {f"{tmp_path}/job_prolog", "/", sys.prefix} <= {
        one.path for one in seen.trusted
    }
    with open("/proc/sys/fs/protected_symlinks") as file:
        assert seen.sysctls["fs.protected_symlinks"] == int(file.read())


def test_the_mpi_library_is_the_one_that_the_ranks_load() -> None:
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    assert mpi_library({}) == (f"{name} {'.'.join(map(str, version))}", "")
    library, fault = mpi_library({"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    assert (library, fault) == ("", "RuntimeError: cannot load MPI library")


def test_the_plugin_is_found_in_included_files_with_its_version(
    tmp_path: Path, plugstack: Path
) -> None:
    first, *more = facts(tmp_path, str(plugstack)).plugins
    assert replace(first, arguments=()) == PluginLine(
        f"{tmp_path}/spank_stage.so", "/opt/bin/python3", "/etc/stage.toml", "1.2.3", "24.11",
        ("first.so",), hashlib.sha256((tmp_path / "spank_stage.so").read_bytes()).hexdigest(),
        file=f"{tmp_path}/plugstack.conf.d/stage.conf",
    )  # fmt: skip
    # The file includes itself as well: that ends.
    assert {replace(line, after=first.after) for line in more} == {first}
    places = [(one.key, one.place.path, one.place.owner) for one in first.arguments]
    assert places == [("python", "/opt/bin/python3", ABSENT), ("config", "/etc/stage.toml", ABSENT)]
    (tmp_path / "spank_stage.so").unlink()
    assert facts(tmp_path, str(plugstack)).plugins[0].version == ""


def test_an_included_file_that_is_closed_to_users_is_told(plugstack: Path) -> None:
    included = plugstack.with_name("plugstack.conf.d") / "stage.conf"
    included.chmod(0o600)
    with ordinary_home() as home:  # the folder of the fixture is closed to others
        shutil.copytree(plugstack.parent, home / "slurm")
        for folder in (home, home / "slurm", home / "slurm/plugstack.conf.d"):
            folder.chmod(0o755)
        seen = facts(home / "slurm", f"{home}/slurm/plugstack.conf")
        closed = f"{home}/slurm/plugstack.conf.d/stage.conf"
        assert seen.closed[closed] == closed
        assert closed in {one.path for one in seen.trusted}


def test_lines_for_plugins_are_read_as_slurm_reads_them(tmp_path: Path, plugstack: Path) -> None:
    assert facts(tmp_path, str(plugstack)).absent_plugins == [], "others are optional"
    ours = tmp_path / "spank_stage.so"
    ours.unlink()
    plugstack.write_text(
        f"require {ours} a=b\nrequired {ours}\nrequired /x/y.so\noptional spank_stage.so\n"
        "optional /x/spank_stag.so\noptional /x/z.so\n"
    )
    seen = facts(tmp_path, str(plugstack))
    assert [(line.plugin, line.required) for line in seen.plugins] == [
        (str(ours), True), ("spank_stage.so", False),
    ]  # fmt: skip
    file = str(plugstack)
    assert seen.absent_plugins == [
        AbsentPlugin(str(ours), required=True, file=file),
        AbsentPlugin("/x/y.so", required=True, file=file),
        AbsentPlugin("/x/spank_stag.so", required=False, file=file),
    ]
    assert seen.ignored_lines == [f"{file}: require {ours} a=b"]
    assert [place.path for place in seen.trusted if not os.path.isabs(place.path)] == []


def test_files_that_users_cannot_read_are_told() -> None:
    with ordinary_home() as home:
        plugstack, ours = home / "plugstack.conf", home / "spank_stage.so"
        plugstack.write_text(f"required {ours}\n")
        ours.touch()
        home.chmod(0o755)

        def closed() -> dict[str, str]:
            return facts(home, str(plugstack)).closed

        for path in (plugstack, ours):
            path.chmod(0o644)
        assert closed() == {}
        ours.chmod(0o640)
        assert closed() == {str(ours): str(ours)}
        ours.chmod(0o644)
        home.chmod(0o750)
        assert closed() == dict.fromkeys([str(plugstack), str(ours)], str(home))


def test_the_arguments_of_the_plugin_are_looked_at_as_its_users_need_them() -> None:
    with ordinary_home() as home:
        home.chmod(0o755)
        closed, config = home / "closed", home / "stage.toml"
        closed.mkdir(mode=0o750)
        (closed / "python3").touch(mode=0o755)
        (home / "python3").symlink_to("closed/python3")
        config.write_text("roots = []")
        config.chmod(0o640)
        plugin = f"required {home}/spank_stage.so"
        path = home / "plugstack.conf"
        path.write_text(f"{plugin} python={home}/python3 config={config} pythn=/a config=b c\n")
        (line,) = facts(home, str(path)).plugins
        assert line.unknown == ("pythn=/a", "config=b", "c")
        python, rules = line.arguments
        assert (python.closed, rules.closed) == (str(closed), str(config))
        assert rules.digest == hashlib.sha256(b"roots = []").hexdigest()
        closed.chmod(0o755)
        config.chmod(0o644)
        (line,) = facts(home, str(path)).plugins
        assert [one.closed for one in line.arguments] == ["", ""]
        path.write_text(f"{plugin}\n")
        (line,) = facts(home, str(path)).plugins
    assert (line.python, line.config) == ("/opt/slurm-stage/bin/python3", "/etc/slurm/stage.toml")


@pytest.mark.parametrize(
    ("note", "ended"), [("", False), ("1 2\n", True), (f"{1 << 40} 2\n", True)]
)
def test_a_slurmd_that_loaded_the_plugin_and_has_ended_is_found(
    tmp_path: Path, plugstack: Path, monkeypatch: pytest.MonkeyPatch, note: str, ended: bool
) -> None:
    monkeypatch.setattr(paths, "RUN_FOLDER", str(tmp_path))
    (tmp_path / "slurmd").write_text(note)
    assert facts(tmp_path, str(plugstack)).plugin_ended == ended, "process 1 is no slurmd"


def test_what_this_user_cannot_see_is_told_apart_from_what_is_absent() -> None:
    with ordinary_home() as home:
        (home / "closed").mkdir(mode=0o700)
        (home / "closed/file").touch()
        (home / "closed").chmod(0o000)
        seen = as_ordinary_user(lambda: [place(f"{home}/{name}") for name in ("closed/file", "no")])
        (home / "closed").chmod(0o700)
    assert [one.owner for one in seen] == [UNSEEN, ABSENT]


def test_the_facts_of_another_node_arrive_as_they_were(tmp_path: Path, plugstack: Path) -> None:
    seen = facts(tmp_path, str(plugstack))
    assert codec_of(NodeFacts).from_data(codec_of(NodeFacts).to_data(seen)) == seen


@pytest.mark.parametrize(
    "change", [{"sysctls": []}, {"roots": [{"path": 5}]}, {"package": None}, {"jobs": "x"}]
)
def test_what_is_not_facts_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    with pytest.raises(
        ValueError, match=r"^(sysctls|package) is not|^the fields are not those of Place$"
    ):
        codec_of(NodeFacts).from_data({**codec_of(NodeFacts).to_data(facts(tmp_path)), **change})


@pytest.mark.parametrize(
    ("named", "found"), [("(null)", "/etc/slurm/plugstack.conf"), ("/etc/p.conf", "/etc/p.conf")]
)
def test_plugstack_conf_is_beside_slurm_conf_unless_that_names_it(
    named: str, found: str, tmp_path: Path
) -> None:
    lines = f"PlugStackConfig         = {named}\nSLURM_CONF              = /etc/slurm/slurm.conf"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\n[ $1 = show ] && echo '{lines}'\n")
    scontrol.chmod(0o755)
    assert site_facts(str(tmp_path)).slurm["PlugStackConfig"] == found


def test_the_scripts_of_this_package_are_known_by_their_names() -> None:
    """Slurm 22.05 writes one Prolog, newer versions a list."""
    assert own_scripts({"TaskProlog": "/x/task_prolog", "Prolog": "/x/job_prolog"}) == [
        "/x/task_prolog", "/x/job_prolog",
    ]  # fmt: skip
    newer = {"Prolog[0]": "/x/job_prolog", "Epilog[0]": "/x/job_epilog", "TaskProlog": "(null)"}
    assert own_scripts(newer) == ["/x/job_prolog", "/x/job_epilog"]
    assert own_scripts({"Prolog": "/site/prolog", "Epilog": "(null)"}) == []


@pytest.mark.root
def test_the_first_folders_of_roots_that_are_open_to_others_are_told(tmp_path: Path) -> None:
    modes = {
        "sticky": 0o1777,
        "closed": 0o755,
        "own": 0o775,
        **{f"open{n}": 0o777 for n in range(7)},
    }
    for name, mode in modes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    (tmp_path / "others").mkdir(mode=0o777)
    os.chown(tmp_path / "others", 47110, 47110)
    (tmp_path / "link").symlink_to("open0")
    told = facts(tmp_path).open_folders
    assert len(told) == 5
    assert {one.path for one in told} < {f"{tmp_path}/open{n}" for n in range(7)}
    for n in range(7):
        (tmp_path / f"open{n}").rmdir()
    (tmp_path / "own").chmod(0o2770)
    assert facts(tmp_path).open_folders == []
    os.chown(tmp_path / "own", 0, 47110)
    assert [one.path for one in facts(tmp_path).open_folders] == [f"{tmp_path}/own"]


@pytest.mark.parametrize(
    ("name", "text", "private"),
    [
        ("job_container.conf", "AutoBasePath=true\nBasePath=/x\n", ("/dev/shm", "/tmp")),
        (
            "job_container.conf",
            "# Dirs=/home\nNodeName=n1 BasePath=/x Dirs=/var/tmp,/scratch/ Shared=true\n",
            ("/dev/shm", "/scratch", "/var/tmp"),
        ),
        (
            "namespace.yaml",
            'defaults:\n  dirs: "/tmp,/var/tmp"\n',
            ("/dev/shm", "/tmp", "/var/tmp"),
        ),
        (
            "namespace.yaml",
            "dir_confs:\n- {path: '/var/tmp', base_path: /y}\n# - path: /home\n- path: /scratch\n",
            ("/dev/shm", "/scratch", "/var/tmp"),
        ),
    ],
)
def test_the_folders_of_namespaces_are_those_in_slurms_files(
    tmp_path: Path, name: str, text: str, private: tuple[str, ...]
) -> None:
    (tmp_path / name).write_text(text)
    assert _private_folders(str(tmp_path)) == private


@pytest.mark.root
@pytest.mark.parametrize(
    ("disk", "kind", "way"),
    [(xfs, "xfs", "reflink"), (ext4, "ext4", "hard link (this ext4 cannot share blocks)")],
)
def test_the_way_from_the_store_is_tried(
    disk: Callable[[], Disk], kind: str, way: str, tmp_path: Path
) -> None:
    with disk() as store:
        (store / "jobs").mkdir()
        roots = (f"{store}/jobs/%j", str(tmp_path), f"{store}/none/%j")
        found = node_facts(Facts(store=str(store), job_roots=roots, computes=False)).store
    assert found
    assert (found.kind, found.by_system, found.place.owner) == (kind, False, 0)
    assert found.ways == {roots[0]: way, roots[1]: "copy (another filesystem)"}


def test_a_store_on_the_disk_of_the_system_is_known() -> None:
    found = node_facts(Facts(store="/", computes=False)).store
    assert found
    assert found.by_system
