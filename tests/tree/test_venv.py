"""Relocate environments: their files and links name the new folder, and nothing else changes."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import pytest
import xxhash

from stager.base.text import printable
from stager.tree.environments import (
    LARGEST,
    Environment,
    Relocation,
    environments_in,
    find_environments,
    moved_target,
    new_names,
    not_plain,
    relocate,
    rewritten,
    with_home,
    with_libraries,
    with_moved_links,
)
from stager.tree.listing import Kind, Listing, Row
from stager.tree.walk import walk
from tests.support.stagectl import STAGECTL, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stager.tree.partial_tree import PartialTree

OLD, NEW = b"/shared/env", b"/nvme/env"


@pytest.mark.parametrize(
    "text",
    [
        "#!{}/bin/python3.11\nimport sys\n",
        '#!/bin/sh\n\'\'\'exec\' "{}/bin/python" "$0" "$@"\n',
        'VIRTUAL_ENV="{}"\n',
        "setenv VIRTUAL_ENV '{}'",
        "command = /usr/bin/python -m venv {}\n",
        "{}/src\n",
        "{}",
        "{}:{}/lib",
    ],
)
def test_a_text_names_the_new_folder(text: str) -> None:
    before, now = text.replace("{}", "/shared/env"), text.replace("{}", "/nvme/env")
    assert rewritten(before.encode(), {OLD: NEW}) == now.encode()


@pytest.mark.parametrize(
    "data",
    [
        b"/shared/env2/bin /shared/env-old /shared/env.d",
        b"home = /opt/shared/env/bin",
        b"./shared/env ~/shared/env x/shared/env -/shared/env \xc3\xa9/shared/env",
        b"\0ELF /shared/env/lib",
        b"/SHARED/env/bin",
        b"",
    ],
)
def test_nothing_else_changes(data: bytes) -> None:
    assert rewritten(data, {OLD: NEW}) == data


@pytest.mark.parametrize("behind", [b"PK\3\4\0\0 /shared/env/x\n", b"# /shared/env\n" * 80_000])
def test_of_a_binary_or_large_program_the_first_line_changes(behind: bytes) -> None:
    data = b"#!/shared/env/bin/python -E\n" + behind
    # A shorter name leaves the rest where it is.
    assert rewritten(data, {OLD: NEW}) == b"#!/nvme/env/bin/python -E  \n" + behind
    longer = b"/nvme/a/longer/name"
    assert rewritten(data, {OLD: longer}) == b"#!/nvme/a/longer/name/bin/python -E\n" + behind


@pytest.mark.parametrize("data", [b"\0#!/shared/env\n", b"#!/shared/env\0\n", b"#!/shared/env/\0"])
def test_binary_data_that_is_no_program_does_not_change(data: bytes) -> None:
    assert rewritten(data, {OLD: NEW}) == data


def test_a_new_path_is_inserted_literally() -> None:
    assert rewritten(b"/a b/bin", {b"/a b": rb"/x\1\g<0>"}) == rb"/x\1\g<0>/bin"


MOVE = Relocation("/shared/env/", "/nvme/env", ())


@pytest.mark.parametrize(
    "line",
    [
        b'VIRTUAL_ENV="/made/here"', b"VIRTUAL_ENV=/made/here", b"VIRTUAL_ENV='/made/here'",
        b'    export VIRTUAL_ENV="/made/here"', b"export VIRTUAL_ENV=/made/here/",
    ],
)  # fmt: skip
def test_an_environment_that_was_moved_may_name_both_folders(line: bytes) -> None:
    script = b"deactivate () {\n    unset VIRTUAL_ENV\n}\n" + line + b"\nexport VIRTUAL_ENV\n"
    assert new_names(MOVE, b"", script) == {OLD: NEW, b"/made/here": NEW}
    names = {OLD: NEW, b"/made/here": NEW + b"/here", b"/made": NEW}
    assert new_names(MOVE, b"here", script) == names


def test_an_environment_that_was_not_moved_names_one_folder() -> None:
    assert new_names(MOVE, b"", b"") == {OLD: NEW}
    assert new_names(MOVE, b"", b'VIRTUAL_ENV="/shared/env"\n') == {OLD: NEW}
    windows = b'VIRTUAL_ENV=$(cygpath "/x")\nexport VIRTUAL_ENV="/shared/env"\n'
    assert new_names(MOVE, b"", windows) == {OLD: NEW}


@pytest.mark.parametrize(
    "script",
    [
        b"\n" * 1_000_000,
        b"VIRTUAL_ENV=/a" + b" " * 1_000_000 + b"x",
        b"\n".join([b"VIRTUAL_ENV=/a" + b" " * 4000 + b"x'"] * 250),
        b" " * 1_000_000 + b"VIRTUAL_ENV",
    ],
)
def test_a_hostile_script_is_read_fast(script: bytes) -> None:
    assert new_names(MOVE, b"", script) == {OLD: NEW}


def test_few_folders_are_taken_from_a_script() -> None:
    script = b"".join(b"VIRTUAL_ENV=/h%d\n" % number for number in range(50_000))
    assert list(new_names(MOVE, b"", script)) == [OLD, b"/h0", b"/h1", b"/h2", b"/h3"]


@pytest.mark.parametrize("place", ["/nvme/env", "/nvme/a.b_c-d+e@f%g=h,i:j~k", "/nvme/\xe9"])
def test_a_plain_destination_is_accepted(place: str) -> None:
    assert not_plain("/shared/env", place) == ""


@pytest.mark.parametrize(
    "place", ["/x y", "/$x", "/`x", '/"x', "/'x", "/x*", "/x\\y", "/x\ny", "/x;y", "/\udcff"]
)
def test_a_destination_that_needs_quoting_is_noted(place: str) -> None:
    assert not_plain("/shared/env", place) == (
        f"note: the Python environment in /shared/env cannot work at {printable(place)}; choose a "
        "DST of letters, digits and . _ - + @ % = , : ~ only"
    )


class Files(dict[bytes, bytes]):
    """The files of a tree in memory, by their paths."""

    def __init__(self, files: dict[bytes, bytes], links: dict[bytes, bytes] | None = None) -> None:
        super().__init__(files)
        rows = [Row(path, Kind.FILE, size=len(data)) for path, data in files.items()]
        rows += [Row(path, Kind.HARD_LINK, target=first) for path, first in (links or {}).items()]
        self.listing = Listing.of([Row(b"", Kind.FOLDER), *rows])

    def read(self, row: int, most: int) -> bytes:
        return self[self.listing.paths[row]][:most]

    def rewrite(self, row: int, data: bytes) -> None:
        self[self.listing.paths[row]] = data

    def relocate(self, environment: Environment | None = None) -> dict[int, tuple[bytes, bytes]]:
        relocation = Relocation("/shared/env", "/nvme/env", [environment or Environment(b"")])
        fresh = b"\1" * len(self.listing)
        tree = cast("PartialTree", self)
        return relocate(tree, self.listing, relocation, fresh=fresh, originals={})


PROGRAM = b"#!/shared/env/bin/python\n"


def test_a_program_with_several_hard_links_is_changed_once() -> None:
    files = Files(
        {b"aa/tool": PROGRAM, b"pyvenv.cfg": b"", b"aa/other": PROGRAM},
        {b"bin/tool": b"aa/tool", b"bin/tool2": b"aa/tool"},
    )
    data = b"#!/nvme/env/bin/python\n"
    row = files.listing.paths.index(b"aa/tool")
    assert files.relocate() == {row: (PROGRAM, xxhash.xxh3_128_digest(data))}
    assert files == {b"aa/tool": data, b"pyvenv.cfg": b"", b"aa/other": PROGRAM}


def test_an_activate_script_that_is_a_hard_link_names_the_old_folder() -> None:
    script = b"VIRTUAL_ENV=/made/here\n"
    files = Files({b"a": script, b"pyvenv.cfg": b"/made/here\n"}, {b"bin/activate": b"a"})
    files.relocate()
    assert files == {b"a": b"VIRTUAL_ENV=/nvme/env\n", b"pyvenv.cfg": b"/nvme/env\n"}


def test_large_programs_are_changed_and_other_large_files_are_not() -> None:
    large = b"x = '/shared/env/x'\n" * (LARGEST // 20 + 1)
    files = Files({b"bin/data": large, b"bin/tool": PROGRAM + large, b"pyvenv.cfg": b""})
    files.relocate()
    assert files[b"bin/data"] == large
    assert files[b"bin/tool"] == b"#!/nvme/env/bin/python  \n" + large


def test_an_environment_in_a_project_names_both_folders_anew() -> None:
    packages = b".venv/lib/python3.11/site-packages/"
    files = Files(
        {
            b".venv/bin/tool": b"#!/shared/env/.venv/bin/python\n",
            b".venv/pyvenv.cfg": b"home = /shared/python/bin\n",
            packages + b"__editable__.x.pth": b"/shared/env/src\n",
            packages + b"__editable___x_finder.py": b"{'x': '/shared/env'}",
            packages + b"x/x.pth": b"/shared/env/src\n",
            b"bin/tool": PROGRAM,
        }
    )
    interpreter, homes = b"/shared/python/bin/python3.11", (b"/shared/python", b"/apps/python")
    files.relocate(Environment(b".venv", (), interpreter, homes, b".venv/.python"))
    assert files == {
        b".venv/bin/tool": b"#!/nvme/env/.venv/bin/python\n",
        b".venv/pyvenv.cfg": b"home = /nvme/env/.venv/.python/bin\n",
        packages + b"__editable__.x.pth": b"/nvme/env/src\n",
        packages + b"__editable___x_finder.py": b"{'x': '/nvme/env'}",
        packages + b"x/x.pth": b"/shared/env/src\n",
        b"bin/tool": PROGRAM,
    }


def test_environments_are_folders_with_a_mark_and_programs() -> None:
    paths = ["", "pyvenv.cfg", "bin", "a/pyvenv.cfg", "b/c/pyvenv.cfg", "b/c/bin", "d/x-pyvenv.cfg"]
    listing = Listing.of(Row(path.encode(), Kind.FILE) for path in [*paths, "d/bin"])
    assert environments_in(listing) == [b"", b"b/c"]


@pytest.mark.parametrize("is_file", [True, False])
def test_a_folder_without_programs_can_have_a_bin(tmp_path: Path, is_file: bool) -> None:
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (tmp_path / "bin").write_text("data") if is_file else (tmp_path / "bin").symlink_to("nowhere")
    ((environment,), _) = found_in(tmp_path)
    assert environment.links == ()


def test_a_program_finds_the_libraries_beside_it(tmp_path: Path) -> None:
    home = tmp_path / "home-of-an-interpreter"
    for folder in (home, home / "bin", home / "lib"):
        folder.mkdir()
    (home / "one.c").write_text("int one(void) { return 1; }")
    (home / "main.c").write_text("int one(void); int main(void) { return one() - 1; }")
    library, program = home / "lib/libone.so", home / "bin/python3"
    subprocess.run(["gcc", "-shared", "-o", library, home / "one.c"], check=True)
    where = [f"-L{home}/lib", "-lone", f"-Wl,-rpath,/nowhere:{home}/lib:/elsewhere"]
    subprocess.run(["gcc", "-o", program, home / "main.c", *where], check=True)
    environment = Environment(b"", homes=(b"/elsewhere", os.fsencode(home)), base=b".python")
    find = partial(with_libraries, path=b".python/bin/python3", environment=environment)
    data = program.read_bytes()
    assert find(data, libraries=[b"libtwo.so"]) == data
    found = find(data, libraries=[b"libone.so"])
    assert len(found) == len(data)
    program.write_bytes(found)
    (tmp_path / "env/bin").mkdir(parents=True)
    home.rename(tmp_path / "env/.python")
    subprocess.run([tmp_path / "env/.python/bin/python3"], check=True)
    copy = tmp_path / "env/bin/python3"
    copy.write_bytes(find(data, path=b"bin/python3", libraries=[b"libone.so"]))
    copy.chmod(0o755)
    subprocess.run([copy], check=True)


def test_a_library_that_is_named_by_a_short_path_stays() -> None:
    data = b"\x7fELF\0libone.so\0/a/lib\0"
    environment = Environment(b"", homes=(b"/a",), base=b".python")
    change = partial(with_libraries, environment=environment, libraries=[b"libone.so"])
    assert change(data, path=b".python/bin/x") == data


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (b"/shared/env/lib", b"/nvme/env/lib"),
        (b"/shared/env", b"/nvme/env"),
        (b"/shared/env2/lib", b"/shared/env2/lib"),
        (b"lib", b"lib"),
    ],
)
def test_a_link_into_the_environment_leads_to_where_it_is_now(
    target: bytes, expected: bytes
) -> None:
    assert moved_target(target, "/shared/env/", "/nvme/env") == expected


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A separate filesystem, as shared storage is."""
    folder = tmp_path / "shared"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def make(folder: Path, interpreter: Path | str, config: str = "") -> Path:
    """Make an environment with links as `python3 -m venv` makes them."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to("python3")
    (folder / "bin/python3").symlink_to(interpreter)
    (folder / "pyvenv.cfg").write_text(config)
    return folder


def install(folder: Path, version: str = "3.12") -> Path:
    """Make what looks like an installation of Python; return its interpreter."""
    for path in (f"bin/python{version}", f"lib/python{version}/os.py"):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).touch()
    return folder / f"bin/python{version}"


def found_in(folder: Path) -> tuple[tuple[Environment, ...], str]:
    return find_environments(str(folder), walk(str(folder)))


@pytest.mark.root
def test_an_interpreter_on_shared_storage_comes_along(shared: Path) -> None:
    interpreter = install(shared / "home/python-3.12.1")
    named = shared / "home/python-3.12"
    named.symlink_to("python-3.12.1")
    config = f"home = {named}/bin\nversion = 3.12.1\n"
    project = shared / "project"
    environment = make(project / ".venv", named / "bin/python3.12", config)
    (environment / "bin/python3-dbg").symlink_to(named / "bin/python3.12")
    (environment / "bin/python2").symlink_to("/usr/bin/env")
    links = b".venv/bin/python3", b".venv/bin/python3-dbg"
    homes = os.fsencode(shared / "home/python-3.12.1"), os.fsencode(named)
    found = Environment(
        b".venv", links, os.fsencode(interpreter), homes, b".venv/.python", comes_along=True
    )
    assert found_in(project) == ((found,), "")
    # Another environment uses the same copy of it.
    make(project / "other", named / "bin/python3.12", config)
    assert [one.base for one in found_in(project)[0]] == [b".venv/.python"] * 2
    # It is found by pyvenv.cfg if bin has copies of it.
    for name in ("python", "python3", "python3-dbg"):
        (environment / "bin" / name).unlink()
    (environment / "bin/python3").touch()
    (named / "bin/python3").symlink_to("python3.12")
    assert found_in(environment)[0] == (replace(found, path=b"", links=(), base=b".python"),)


@pytest.mark.root
def test_an_interpreter_in_the_staged_folder_is_there_already(shared: Path) -> None:
    interpreter = install(shared / "project/tools/python")
    make(shared / "project/.venv", interpreter)
    ((found,), note) = found_in(shared / "project")
    assert (found.base, found.comes_along, note) == (b"tools/python", False, "")


@pytest.mark.root
def test_an_interpreter_of_the_system_stays_where_it_is(shared: Path) -> None:
    environment = make(shared / "env", "/usr/bin/env")
    found = Environment(b"", (b"bin/python3",), b"/usr/bin/env", (b"/usr",))
    assert found_in(environment) == ((found,), "")


@pytest.mark.root
def test_an_interpreter_that_cannot_work_on_the_nodes_is_noted(shared: Path) -> None:
    remedy = "make it with a Python that they have, or with one on shared storage"
    env = make(shared / "env", "/nowhere/python3")
    assert found_in(env)[1] == (
        f"note: the interpreter of {env}, /nowhere/python3, is not on the nodes; {remedy}"
    )
    for name in ("python", "python3"):
        (env / "bin" / name).unlink()
        (env / "bin" / name).touch()
    (env / "pyvenv.cfg").write_text("home = /nowhere\n")
    assert found_in(env)[1] == (
        f"note: the interpreter of {env}, /nowhere/python, is not on the nodes; {remedy}"
    )
    old = install(shared / "python", "3.9")
    env = make(shared / "old", old, "version_info = 3.12.1.final.0\n")
    assert found_in(env)[1] == (
        f"note: {env} was made with Python 3.12, but on the nodes its interpreter is {old}; "
        f"{remedy}"
    )
    alone = shared / "alone/bin/python3.12"
    alone.parent.mkdir(parents=True)
    alone.touch()
    env = make(shared / "new", alone)
    assert found_in(env)[1] == (
        f"note: the interpreter of {env}, {alone}, is still read from shared storage"
    )


@pytest.mark.root
def test_packages_that_are_read_from_shared_storage_are_noted(shared: Path) -> None:
    env = make(shared / "env", "/usr/bin/env")
    packages = env / "lib/python3.12/site-packages"
    packages.mkdir(parents=True)
    (shared / "src").mkdir()
    (packages / "own.pth").write_text(f"import x\n{env}/src\n/usr/lib\n{shared}/absent\n")
    assert found_in(env)[1] == ""
    for name, text in (
        ("x.pth", f"{shared}/src\n"),
        ("__editable___x_finder.py", f"MAPPING = {{'x': '{shared}/src'}}"),
    ):
        (packages / name).write_text(text)
        assert found_in(env)[1] == (
            f"note: {packages}/{name} leads to {shared}/src, on shared storage"
        )
        (packages / name).unlink()


@pytest.mark.root
def test_a_strangers_environment_brings_nothing_of_this_user(shared: Path) -> None:
    interpreter = install(shared / "python")
    env = make(shared / "env", interpreter)
    os.chown(env, 1234, 1234)
    ((found,), note) = found_in(env)
    assert (found.comes_along, note.endswith("is still read from shared storage")) == (False, True)
    os.chown(shared / "python", 1234, 1234)  # the stranger's own
    assert found_in(env)[0][0].comes_along


def test_a_conda_environment_is_noted_unless_conda_pack_made_it(tmp_path: Path) -> None:
    env = tmp_path / "env"
    (env / "conda-meta").mkdir(parents=True)
    (env / "bin").mkdir()
    note = (
        f"note: {env} is a conda environment, whose files name that folder; pack it by conda-pack "
        f"-p {env} --dest-prefix DST -o FILE.tar.gz, and stage FILE.tar.gz:DST,extract"
    )
    assert found_in(env) == ((), note)
    for line, expected in (
        (f"#!{env}/bin/python", note),
        ("#!/nvme/env/bin/python", ""),
        ("#!/usr/bin/env python", ""),
        (f"#!/bin/sh\n'''exec' \"{env}/bin/python\" \"$0\"", note),
    ):
        (env / "bin/pip").write_text(f"{line}\n\n# {env}\n")
        assert found_in(env) == ((), expected)


def test_the_links_to_the_interpreter_and_no_others_lead_to_it() -> None:
    paths = [b"bin/python", b"bin/python3", b"bin/tool", b"lib64"]
    targets = {1: b"python3", 2: b"../../inst/bin/python3.12", 3: b"/home/a/tool", 4: b"lib"}
    rows = zip(paths, targets.values(), strict=True)
    links_in = (Row(path, Kind.LINK, target=target) for path, target in rows)
    listing = Listing.of([Row(b"", Kind.FOLDER), *links_in])
    interpreter = b"/home/a/inst/bin/python3.12"
    for base, now in ((b".python", b"/nvme/env/.python/bin/python3.12"), (b"", interpreter)):
        found = Environment(b"", (b"bin/python3",), interpreter, (b"/home/a/inst",), base)
        moved = with_moved_links(listing, Relocation("/shared/env", "/nvme/env", [found]))
        assert moved.targets == {**targets, 2: now}


def test_pyvenv_cfg_names_the_folder_of_the_interpreter() -> None:
    config = b"home = /home/a/bin\nversion = 3.12.1\nhomes = /x\n"
    expected = b"home = /nvme/p\\1/bin\nversion = 3.12.1\nhomes = /x\n"
    assert with_home(config, rb"/nvme/p\1/bin") == expected


@pytest.mark.root
def test_an_interpreter_is_a_part_of_the_copy(shared: Path, tmp_path: Path) -> None:
    interpreter = install(shared / "python")
    (shared / "python/bin/other").touch()
    (shared / "python/lib/python3.12/twin.py").hardlink_to(shared / "python/lib/python3.12/os.py")
    (shared / "python/lib/python3.12/site-packages").mkdir()
    (shared / "python/lib/python3.12/site-packages/pip.py").touch()
    make(shared / "project/.venv", interpreter, f"home = {interpreter.parent}\n")
    rules = tmp_path / "stage.toml"
    rules.write_text('roots = ["/nvme"]\n[launch.environment]\nOMPI_MCA_btl = "self,sm"\n')
    copy = tmp_path / "disks/node2/nvme/project/.venv"

    def stage(*options: str) -> str:
        line = [*STAGECTL, "stage", "--local", "2", "--config", str(rules), "--local-root"]
        directive = ",".join([f"{shared}/project:/nvme/project", *options])
        ran = run([*line, str(tmp_path / "disks"), directive])
        assert ran.code == 0, ran
        return ran.out

    assert "stage: /nvme/project: 3 files, " in stage()
    home = "/nvme/project/.venv/.python/bin"
    assert (copy / "pyvenv.cfg").read_text() == f"home = {home}\n"
    assert os.readlink(copy / "bin/python3") == f"{home}/python3.12"
    found = sorted(str(path.relative_to(copy)) for path in (copy / ".python").rglob("*.*"))
    libraries = ".python/lib/python3.12"
    programs = [".python/bin/python3.12", libraries]
    assert found == [*programs, f"{libraries}/os.py", f"{libraries}/twin.py"]
    assert "nothing moved" in stage()
    (shared / "python/lib/python3.12/new.py").touch()
    assert "stage: /nvme/project: 1 file, " in stage()
    stage("relocate=no")
    assert os.readlink(copy / "bin/python3") == str(interpreter)
    assert not (copy / ".python").exists()
