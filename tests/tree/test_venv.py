"""Relocate environments: their files and links name the new folder, and nothing else changes."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING, cast

import pytest
import xxhash

from stager.base.errors import UsageError
from stager.tree.listing import Kind, Listing, Row
from stager.tree.venv import (
    LARGEST,
    Interpreter,
    Relocation,
    check_place,
    find_interpreter,
    may_name_its_folder,
    moved_target,
    note,
    own_folders,
    relocate,
    rewritten,
    staged_at,
    with_home,
    with_moved_links,
)
from tests.support.stagectl import STAGECTL, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stager.tree.partial import PartialTree

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
    assert rewritten(before.encode(), [OLD], NEW) == now.encode()


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
    assert rewritten(data, [OLD], NEW) == data


@pytest.mark.parametrize("behind", [b"PK\3\4\0\0 /shared/env/x\n", b"# /shared/env\n" * 80_000])
def test_of_a_binary_or_large_program_the_first_line_changes(behind: bytes) -> None:
    data = b"#!/shared/env/bin/python -E\n" + behind
    # A shorter name leaves the rest where it is.
    assert rewritten(data, [OLD], NEW) == b"#!/nvme/env/bin/python -E  \n" + behind
    longer = b"/nvme/a/longer/name"
    assert rewritten(data, [OLD], longer) == b"#!/nvme/a/longer/name/bin/python -E\n" + behind


@pytest.mark.parametrize("data", [b"\0#!/shared/env\n", b"#!/shared/env\0\n", b"#!/shared/env/\0"])
def test_binary_data_that_is_no_program_does_not_change(data: bytes) -> None:
    assert rewritten(data, [OLD], NEW) == data


def test_a_new_path_is_inserted_literally() -> None:
    assert rewritten(b"/a b/bin", [b"/a b"], rb"/x\1\g<0>") == rb"/x\1\g<0>/bin"


@pytest.mark.parametrize(
    "line",
    [
        b'VIRTUAL_ENV="/made/here"', b"VIRTUAL_ENV=/made/here", b"VIRTUAL_ENV='/made/here'",
        b'    export VIRTUAL_ENV="/made/here"', b"export VIRTUAL_ENV=/made/here/",
    ],
)  # fmt: skip
def test_an_environment_that_was_moved_may_name_both_folders(line: bytes) -> None:
    script = b"deactivate () {\n    unset VIRTUAL_ENV\n}\n" + line + b"\nexport VIRTUAL_ENV\n"
    assert own_folders("/shared/env/", script) == (b"/shared/env", b"/made/here")


def test_an_environment_that_was_not_moved_names_one_folder() -> None:
    assert own_folders("/shared/env", b"") == (b"/shared/env",)
    assert own_folders("/shared/env", b'VIRTUAL_ENV="/shared/env"\n') == (b"/shared/env",)
    windows = b'VIRTUAL_ENV=$(cygpath "/x")\nexport VIRTUAL_ENV="/shared/env"\n'
    assert own_folders("/shared/env", windows) == (b"/shared/env",)


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
    assert own_folders("/shared/env", script) == (b"/shared/env",)


def test_few_folders_are_taken_from_a_script() -> None:
    script = b"".join(b"VIRTUAL_ENV=/h%d\n" % number for number in range(50_000))
    assert own_folders("/shared/env", script) == (b"/shared/env", b"/h0", b"/h1", b"/h2", b"/h3")


@pytest.mark.parametrize("place", ["/nvme/env", "/nvme/a.b_c-d+e@f%g=h,i:j~k", "/nvme/\xe9"])
def test_a_plain_destination_is_accepted(place: str) -> None:
    check_place(place)


@pytest.mark.parametrize(
    "place", ["/x y", "/$x", "/`x", '/"x', "/'x", "/x*", "/x\\y", "/x\ny", "/x;y", "/\udcff"]
)
def test_a_destination_that_needs_quoting_is_refused(place: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_place(place)
    assert caught.value.message == (
        f"{place} has a character that the path of a relocated Python environment cannot have; "
        "choose a DST of letters, digits and . _ - + @ % = , : ~ only"
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

    def relocate(self, destination: str = "/nvme/env") -> dict[int, tuple[bytes, bytes]]:
        relocation = Relocation("/shared/env", destination)
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


def test_a_folder_that_cannot_be_relocated_is_refused() -> None:
    why = "has no pyvenv.cfg at its top, so it is not a virtual environment"
    remedy = "stage it without relocate"
    with pytest.raises(UsageError, match=re.escape(f"/shared/env {why}; {remedy}")):
        Files({b"env/pyvenv.txt": b""}).relocate()
    why, other = "has no pyvenv.cfg at its top, but its folder my/env has one", "stage that folder "
    with pytest.raises(UsageError, match=re.escape(f"/shared/env {why}; {other}")):
        Files({b"my/env/pyvenv.cfg": b"", b"my/env/lib/other/pyvenv.cfg": b""}).relocate()
    with pytest.raises(UsageError, match="/nvme/my env has a character that"):
        Files({b"pyvenv.cfg": b""}).relocate("/nvme/my env")


def test_a_conda_environment_is_refused_with_the_command_for_it() -> None:
    with pytest.raises(UsageError) as caught:
        Files({b"conda-meta": b""}).relocate()
    assert str(caught.value) == (
        "/shared/env is a conda environment, which relocate cannot change; pack it for its "
        "destination with conda-pack -p /shared/env --dest-prefix /nvme/env -o FILE.tar.gz, and "
        "stage FILE.tar.gz with extract and without relocate"
    )


@pytest.mark.parametrize(
    ("path", "may"),
    [
        (b"bin/pip", True),
        (b"bin/activate.fish", True),
        (b"pyvenv.cfg", True),
        (b"lib/python3.11/site-packages/__editable__.pth", True),
        (b"lib64/python3.12/site-packages/x.pth", True),
        (b"bin/sub/pip", False),
        (b"lib/python3.11/site-packages/numpy/x.pth", False),
        (b"lib/python3.11/site-packages/x.py", False),
        (b"x/pyvenv.cfg", False),
    ],
)
def test_which_files_may_name_their_folder(path: bytes, *, may: bool) -> None:
    assert may_name_its_folder(path) == may


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


def make(folder: Path, interpreter: Path | str) -> str:
    """Make an environment with links as `python3 -m venv` makes them."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to("python3")
    (folder / "bin/python3").symlink_to(interpreter)
    return str(folder)


@pytest.mark.root
def test_an_interpreter_beside_the_source_is_on_shared_storage(shared: Path) -> None:
    interpreter = shared / "home/python-3.12.1/bin/python3.12"
    interpreter.parent.mkdir(parents=True)
    interpreter.touch()
    (shared / "home/python-3.12").symlink_to("python-3.12.1")
    environment = make(shared / "env", shared / "home/python-3.12/bin/python3.12")
    (shared / "env/bin/python3-dbg").symlink_to("../../home/python-3.12/bin/python3.12")
    (shared / "env/bin/python2").symlink_to("/usr/bin/env")
    links = frozenset({b"bin/python3", b"bin/python3-dbg"})
    found = Interpreter(str(interpreter), links, is_shared=True)
    assert find_interpreter(environment, environment) == found
    (shared / "env/bin/python").unlink()
    assert find_interpreter(environment, environment) == found


@pytest.mark.root
def test_an_interpreter_of_the_system_is_not_shared(shared: Path) -> None:
    environment = make(shared / "env", "/usr/bin/env")
    found = Interpreter("/usr/bin/env", frozenset({b"bin/python3"}), is_shared=False)
    assert find_interpreter(environment, environment) == found


@pytest.mark.root
def test_an_interpreter_in_the_environment_is_none(shared: Path) -> None:
    environment = make(shared / "env", "python3.12")
    (shared / "env/bin/python3.12").touch()
    assert find_interpreter(environment, environment) is None


def test_an_interpreter_that_does_not_exist_is_none(tmp_path: Path) -> None:
    environment = make(tmp_path / "env", "/nowhere/python3")
    assert find_interpreter(environment, environment) is None
    assert find_interpreter(str(tmp_path), str(tmp_path)) is None


def test_an_interpreter_is_staged_with_its_installation(tmp_path: Path) -> None:
    (tmp_path / "python-3.12.1/bin").mkdir(parents=True)
    (tmp_path / "python-3.12").symlink_to("python-3.12.1")
    interpreter = f"{tmp_path}/python-3.12.1/bin/python3.12"
    for source in ("python-3.12", "python-3.12.1"):
        places = [("/shared/data", "/nvme/data"), (f"{tmp_path}/{source}", "/nvme/python")]
        assert staged_at(interpreter, places) == "/nvme/python/bin/python3.12"
    assert staged_at(interpreter, [(f"{tmp_path}/python", "/nvme/python")]) == ""
    assert staged_at("", [("/", "/nvme/all")]) == ""


def test_the_links_to_the_interpreter_and_no_others_lead_to_it() -> None:
    paths = [b"bin/python", b"bin/python3", b"bin/tool", b"lib64"]
    targets = {1: b"python3", 2: b"../../inst/bin/python3.12", 3: b"/home/a/tool", 4: b"lib"}
    rows = zip(paths, targets.values(), strict=True)
    links_in = (Row(path, Kind.LINK, target=target) for path, target in rows)
    listing = Listing.of([Row(b"", Kind.FOLDER), *links_in])
    links = frozenset({b"bin/python3"})
    path = "/home/a/inst/bin/python3.12"
    for at, now in (
        ("/nvme/inst/bin/python3.12", b"/nvme/inst/bin/python3.12"),
        ("", path.encode()),
    ):
        found = Interpreter(path, links, is_shared=True, at=at)
        moved = with_moved_links(listing, Relocation("/shared/env", "/nvme/env"), found)
        assert moved.targets == {**targets, 2: now}


def test_pyvenv_cfg_names_the_folder_of_the_interpreter() -> None:
    config = b"home = /home/a/bin\nversion = 3.12.1\nhomes = /x\n"
    expected = b"home = /nvme/p\\1/bin\nversion = 3.12.1\nhomes = /x\n"
    assert with_home(config, os.fsdecode(rb"/nvme/p\1/bin/python3")) == expected


def test_the_user_is_told_what_to_add() -> None:
    path = "/home/a/python-3.12/bin/python3.12"
    text = f"note: the environment's interpreter {path} is still read from shared storage"
    assert note(path, may_be_staged=False) == text
    assert note(path, may_be_staged=True) == (
        f"{text}; to avoid that, the same job must also stage /home/a/python-3.12"
    )


@pytest.mark.root
def test_an_environment_uses_the_interpreter_that_is_staged_with_it(
    shared: Path, tmp_path: Path
) -> None:
    python = shared / "python/bin/python3.12"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    make(shared / "env", python)
    (shared / "env/pyvenv.cfg").write_text(f"home = {python.parent}\n")
    rules = tmp_path / "stage.toml"
    rules.write_text('roots = ["/nvme"]\n[launch.environment]\nOMPI_MCA_btl = "self,sm"\n')
    environment, installation = f"{shared}/env:/nvme/env,relocate=venv", f"{shared}/python:/nvme/py"
    copy = tmp_path / "disks/node2/nvme/env"

    def stage(*directives: str) -> str:
        line = [*STAGECTL, "stage", "--local", "2", "--config", str(rules)]
        ran = run([*line, "--local-root", str(tmp_path / "disks"), *directives])
        assert ran.code == 0, ran
        return ran.out

    noted = f"stage: /nvme/env: note: the environment's interpreter {python} is still read from"
    remedy = f"shared storage; to avoid that, the same job must also stage {shared}/python"
    assert f"{noted} {remedy}\n" in stage(environment)
    assert os.readlink(copy / "bin/python3") == str(python)
    for _ in range(2):
        assert "interpreter" not in stage(environment, installation)
        assert os.readlink(copy / "bin/python3") == "/nvme/py/bin/python3.12"
        assert os.readlink(copy / "bin/python") == "python3"
        assert (copy / "pyvenv.cfg").read_text() == "home = /nvme/py/bin\n"
    assert "nothing moved" in stage(environment, installation)
    # Without the installation in the same job, its copy may be removed: do not depend on it.
    assert noted in stage(environment)
    assert os.readlink(copy / "bin/python3") == str(python)
    assert (copy / "pyvenv.cfg").read_text() == f"home = {python.parent}\n"
