"""``stagectl importer``: what pyxis calls for an image. With nodes: ``cluster/test_images.py``."""

from __future__ import annotations

import pytest

from tests.support.desk import JOB, OUTSIDE, Desk
from tests.support.stagectl import Ran

NOT_ALLOWED = (
    "docker://docker.io/library/ubuntu: this site stages from no URL; copy it to the shared "
    "storage first, or ask the administrator (allow in [source] of stage.toml)"
)
NO_REGISTRY = "the image dockerd://a is in no registry; write docker://REGISTRY#NAME:TAG"


def test_release_does_nothing(desk: Desk) -> None:
    assert desk.stagectl("importer", "release") == Ran(0, "", "")


@pytest.mark.parametrize(
    ("uri", "variables", "code", "message"),
    [
        ("docker://ubuntu", {}, 2, OUTSIDE),
        ("dockerd://a", JOB, 2, NO_REGISTRY),
        ("docker://ubuntu", JOB, 3, NOT_ALLOWED),
    ],
    ids=["outside of a job", "no registry", "not allowed"],
)  # fmt: skip
def test_what_cannot_be_got_is_told(
    desk: Desk, uri: str, variables: dict[str, str], code: int, message: str
) -> None:
    assert desk.stagectl("importer", "get", uri, **variables) == Ran(
        code, "", f"stage: {message}\n"
    )
