"""What an ordinary user makes of what root's part would make."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from stager.base.codec import codec_of
from stager.node import user_folders
from stager.node.user_folders import NodePrepared, Prepared, prepare_node
from tests.support.users import as_ordinary_user

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.root


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root in which all users may write, on a node without root's part."""
    monkeypatch.setattr(user_folders, "jobs_are_known", lambda: False)
    root = tmp_path / "nvme"
    root.mkdir()
    root.chmod(0o1777)
    return root


CODEC = codec_of(NodePrepared)


def prepared(root: Path) -> Prepared:
    """Return what became of the root, after it went over the wire."""

    def act() -> bytes:
        return CODEC.encode(prepare_node([str(root)], "/etc/stage.toml"))

    [only] = CODEC.decode(as_ordinary_user(act)).roots
    return only


def modes(root: Path) -> dict[str, tuple[int, int]]:
    """Return owner and mode of what is in the root."""
    facts = {str(path.relative_to(root)): path.stat() for path in sorted(root.rglob("*"))}
    return {name: (one.st_uid, one.st_mode & 0o7777) for name, one in facts.items()}


def test_a_root_of_all_users_is_taken_and_said_to_be_so(root: Path) -> None:
    own = f"{root}/.slurm-stage"
    uid = as_ordinary_user(os.getuid)
    assert prepared(root) == Prepared(str(root), (own, f"{own}/{uid}"), taken=True)
    assert prepared(root) == Prepared(str(root), taken=True)
    inner = dict.fromkeys((f"/{name}" for name in ("", "partial", "records")), (uid, 0o700))
    assert modes(root) == {
        ".slurm-stage": (uid, 0o755),
        **{f".slurm-stage/{uid}{name}".rstrip("/"): facts for name, facts in inner.items()},
    }


def test_a_missing_root_is_made_where_the_user_may_and_said_to_be_taken(root: Path) -> None:
    assert prepared(root / "own") == Prepared(f"{root}/own", (f"{root}/own",), taken=True)
    assert prepared(root / "own") == Prepared(f"{root}/own")
    root.chmod(0o755)
    other = prepared(root / "other")
    assert (other.code, other.made, (root / "other").exists()) == (6, (), False)
    assert f"{root}/other" in other.problem


def test_what_roots_part_or_somebody_else_made_is_left_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = as_ordinary_user(os.getuid)
    own = root / ".slurm-stage"
    monkeypatch.setattr(user_folders, "jobs_are_known", lambda: True)
    assert prepared(root).problem == (
        f"{own} is missing: root's part, which runs on this node, makes it at the start of a job"
    )
    own.mkdir()
    assert prepared(root).problem == (
        f"{own}/{uid} is missing, and only root can make it: {sys.executable} -I -m "
        f"stager.node.prolog --config /etc/stage.toml {uid}"
    )
    os.chown(own, uid + 1, uid + 1)
    assert prepared(root).problem == (
        f"{own} belongs to uid {uid + 1}, not to uid 0 or uid {uid}; tell the administrator"
    )
    assert list(modes(root)) == [".slurm-stage"]
    os.chown(own, 0, 0)
    (own / str(uid)).mkdir(mode=0o700)
    os.chown(own / str(uid), uid, uid)
    assert prepared(root) == Prepared(str(root))


@pytest.mark.parametrize(
    "change", [{"made": [1]}, {"problem": None}, {"code": 10}, {"taken": "yes"}, {"root": 1}]
)
def test_the_answer_of_a_node_is_checked(change: dict[str, object]) -> None:
    answer = CODEC.to_data(NodePrepared((Prepared("/nvme"),), marks=True))
    assert CODEC.to_data(CODEC.from_data(answer)) == answer
    answer["roots"][0].update(change)
    with pytest.raises((ValueError, TypeError)):
        CODEC.from_data(answer)
