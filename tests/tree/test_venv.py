"""Files of Python environments: what names the old folder names the new one, and nothing else."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import xxhash

from stager.base.errors import UsageError
from stager.rank.tree_cargo import relocate
from stager.tree.listing import Kind, Listing, Row
from stager.tree.venv import LARGEST, check_place, homes, led, may_name_its_folder, relocated

if TYPE_CHECKING:
    from stager.rank.cargo import Task
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
    assert relocated(before.encode(), [OLD], NEW) == now.encode()


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
    assert relocated(data, [OLD], NEW) == data


@pytest.mark.parametrize("behind", [b"PK\3\4\0\0 /shared/env/x\n", b"# /shared/env\n" * 80_000])
def test_what_is_no_text_behind_its_first_line_changes_in_that(behind: bytes) -> None:
    data = b"#!/shared/env/bin/python -E\n" + behind
    # A shorter name leaves the rest where it is.
    assert relocated(data, [OLD], NEW) == b"#!/nvme/env/bin/python -E  \n" + behind
    longer = b"/nvme/a/longer/name"
    assert relocated(data, [OLD], longer) == b"#!/nvme/a/longer/name/bin/python -E\n" + behind


@pytest.mark.parametrize("data", [b"\0#!/shared/env\n", b"#!/shared/env\0\n", b"#!/shared/env/\0"])
def test_what_only_looks_like_a_program_does_not(data: bytes) -> None:
    assert relocated(data, [OLD], NEW) == data


def test_a_new_name_is_taken_as_it_is() -> None:
    assert relocated(b"/a b/bin", [b"/a b"], rb"/x\1\g<0>") == rb"/x\1\g<0>/bin"


@pytest.mark.parametrize(
    "line",
    [
        b'VIRTUAL_ENV="/made/here"', b"VIRTUAL_ENV=/made/here", b"VIRTUAL_ENV='/made/here'",
        b'    export VIRTUAL_ENV="/made/here"', b"export VIRTUAL_ENV=/made/here/",
    ],
)  # fmt: skip
def test_an_environment_that_was_moved_knows_itself_by_two_names(line: bytes) -> None:
    script = b"deactivate () {\n    unset VIRTUAL_ENV\n}\n" + line + b"\nexport VIRTUAL_ENV\n"
    assert homes("/shared/env/", script) == (b"/shared/env", b"/made/here")


def test_one_that_was_not_by_one() -> None:
    assert homes("/shared/env", b"") == (b"/shared/env",)
    assert homes("/shared/env", b'VIRTUAL_ENV="/shared/env"\n') == (b"/shared/env",)
    windows = b'VIRTUAL_ENV=$(cygpath "/x")\nexport VIRTUAL_ENV="/shared/env"\n'
    assert homes("/shared/env", windows) == (b"/shared/env",)


@pytest.mark.parametrize(
    "script",
    [
        b"\n" * 1_000_000,
        b"VIRTUAL_ENV=/a" + b" " * 1_000_000 + b"x",
        b"\n".join([b"VIRTUAL_ENV=/a" + b" " * 4000 + b"x'"] * 250),
        b" " * 1_000_000 + b"VIRTUAL_ENV",
    ],
)
def test_a_hostile_script_takes_no_time(script: bytes) -> None:
    assert homes("/shared/env", script) == (b"/shared/env",)


def test_an_environment_has_few_names() -> None:
    script = b"".join(b"VIRTUAL_ENV=/h%d\n" % number for number in range(50_000))
    assert homes("/shared/env", script) == (b"/shared/env", b"/h0", b"/h1", b"/h2", b"/h3")


@pytest.mark.parametrize("place", ["/nvme/env", "/nvme/a.b_c-d+e@f%g=h,i:j~k", "/nvme/\xe9"])
def test_places_that_mean_themselves(place: str) -> None:
    check_place(place)


@pytest.mark.parametrize(
    "place", ["/x y", "/$x", "/`x", '/"x', "/'x", "/x*", "/x\\y", "/x\ny", "/x;y", "/\udcff"]
)
def test_other_places_are_refused(place: str) -> None:
    with pytest.raises(UsageError) as told:
        check_place(place)
    assert told.value.message == (
        f"{place} has a character in it that Python environments cannot be staged to by relocate; "
        "choose a DST of letters, digits and . _ - + @ % = , : ~ only"
    )


class Files(dict[bytes, bytes]):
    """What a tree holds, by the paths of its listing."""

    def __init__(self, files: dict[bytes, bytes], twins: dict[bytes, bytes] | None = None) -> None:
        super().__init__(files)
        rows = [Row(path, Kind.FILE, size=len(data)) for path, data in files.items()]
        rows += [Row(path, Kind.HARD_LINK, target=first) for path, first in (twins or {}).items()]
        self.listing = Listing.of([Row(b"", Kind.FOLDER), *rows])

    def read(self, row: int, most: int) -> bytes:
        return self[self.listing.paths[row]][:most]

    def rewrite(self, row: int, data: bytes) -> None:
        self[self.listing.paths[row]] = data

    def relocate(self, destination: str = "/nvme/env") -> dict[int, tuple[bytes, bytes]]:
        item = SimpleNamespace(source="/shared/env", destination=destination)
        task = SimpleNamespace(item=item, source=SimpleNamespace(interpreter_at=""))
        fresh = b"\1" * len(self.listing)
        return relocate(
            cast("Task", task), cast("PartialTree", self), self.listing, fresh, {}
        )  # fmt: skip


PROGRAM = b"#!/shared/env/bin/python\n"


def test_a_program_that_has_another_name_elsewhere_is_changed_once() -> None:
    files = Files(
        {b"aa/tool": PROGRAM, b"pyvenv.cfg": b"", b"aa/other": PROGRAM},
        {b"bin/tool": b"aa/tool", b"bin/tool2": b"aa/tool"},
    )
    data = b"#!/nvme/env/bin/python\n"
    row = files.listing.paths.index(b"aa/tool")
    assert files.relocate() == {row: (PROGRAM, xxhash.xxh3_128_digest(data))}
    assert files == {b"aa/tool": data, b"pyvenv.cfg": b"", b"aa/other": PROGRAM}


def test_a_script_that_has_another_name_elsewhere_tells_where_the_environment_was() -> None:
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


def test_what_cannot_be_relocated_is_told() -> None:
    why = "has no pyvenv.cfg at its top, and is no virtual environment to be relocated"
    with pytest.raises(UsageError, match=re.escape(f"/shared/env {why}")):
        Files({b"env/pyvenv.cfg": b""}).relocate()
    with pytest.raises(UsageError, match="/nvme/my env has a character in it"):
        Files({b"pyvenv.cfg": b""}).relocate("/nvme/my env")


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
    assert led(target, "/shared/env/", "/nvme/env") == expected
