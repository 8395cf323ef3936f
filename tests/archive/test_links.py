"""Links may not lead out of an archive, but for an environment's link to its interpreter."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

import pytest

from tests.support.archives import NO_LIMITS, a_file, a_link, refusal, refused, tar_of, unpack

if TYPE_CHECKING:
    from pathlib import Path


def test_the_link_of_an_environment_to_its_interpreter_may_lead_out(out: Path) -> None:
    links = {
        "bin/python": "python3",
        "bin/python3": "/usr/bin/python3.11",
        "env/bin/python3": "/usr/bin/python3.11",
    }
    entries = [a_link(name, target) for name, target in links.items()]
    unpack(io.BytesIO(tar_of(*entries)), "x.tar", bytes(out), NO_LIMITS)
    assert {name: os.readlink(out / name) for name in links} == links


def chain(count: int) -> bytes:
    links = (a_link(f"l{number}", f"l{number - 1}") for number in range(1, count + 1))
    return tar_of(a_file("l0"), *links)


@pytest.mark.parametrize("turned", [False, True])
def test_links_are_followed_as_far_as_the_kernel_does(out: Path, *, turned: bool) -> None:
    unpack(io.BytesIO(chain(40)), "x.tar", bytes(out), NO_LIMITS)
    assert (out / "l40").read_bytes() == b"data"
    links = [a_link(f"m{number}", f"m{number - 1}") for number in range(1, 3000)]
    text = tar_of(a_file("m0"), *(links[::-1] if turned else links))
    why = "is a link that passes through more than 40 links"
    assert refused(text, out) == refusal("m2999" if turned else "m41", why)


def test_many_links_through_many_links(out: Path) -> None:
    links = (a_link(f"m{number}", "l39") for number in range(3000))
    text = chain(39)[: 512 * 41] + tar_of(*links)
    unpack(io.BytesIO(text), "x.tar", bytes(out), NO_LIMITS)
    assert (out / "m2999").read_bytes() == b"data"


def test_a_link_in_a_ring_leads_nowhere(out: Path) -> None:
    text = tar_of(a_link("a", "b"), a_link("b", "a"))
    why = "is a link that passes through more than 40 links"
    assert refused(text, out) == refusal("a", why)


def test_a_link_that_a_file_replaced_is_not_checked(out: Path) -> None:
    text = tar_of(a_link("a", "/etc"), a_file("a"), a_link("b", "./a"))
    unpack(io.BytesIO(text), "x.tar", bytes(out), NO_LIMITS)
    assert (out / "b").read_bytes() == b"data"


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("bin/python3.13t", "/usr/bin/python3.13t"),
        ("bin/python", "/opt/pypy/bin/pypy3"),
        ("bin/pypy3.10", "/opt/pypy/bin/pypy3.10"),
    ],
)
def test_interpreters_may_have_other_names(out: Path, name: str, target: str) -> None:
    unpack(io.BytesIO(tar_of(a_link(name, target))), "x.tar", bytes(out), NO_LIMITS)
    assert os.readlink(out / name) == target
