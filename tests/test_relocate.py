"""Files of Python environments: what names the old folder names the new one, and nothing else."""

from __future__ import annotations

import pytest

from stager.relocate import homes, may_name_its_folder, relocated

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
        b"\0ELF /shared/env/lib",
        b"/SHARED/env/bin",
        b"",
    ],
)
def test_nothing_else_changes(data: bytes) -> None:
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
