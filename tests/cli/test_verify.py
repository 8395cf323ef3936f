"""``stagectl verify``: copies that are well, and one that is damaged."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

from tests.support.stagectl import Ran

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.desk import Desk


def test_a_damaged_copy_ends_verify_with_7(copies: Desk) -> None:
    well = "stage: /nvme/img.sqsh: verified on node[1-3] (3 nodes)\n"
    assert copies.simulated("verify") == Ran(0, well, "")
    copy = copies.copy(2)
    facts = copy.stat()
    with copy.open("r+b") as file:
        file.write(b"x")
    os.utime(copy, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    fault = "the copy is damaged: its bytes differ from its checksum; stage it again"
    assert copies.simulated("verify") == Ran(
        7, "stage: /nvme/img.sqsh: verified on node[1,3] (2 nodes)\n",
        f"stage: node2: /nvme/img.sqsh: {fault}\n",
    )  # fmt: skip
    ran = copies.simulated("verify", "--json", "/nvme/img.sqsh")
    printed = json.loads(ran.out)
    assert (ran.code, ran.err, printed["code"], printed["dry_run"]) == (7, "", 7, False)
    verified = {
        "destination": "/nvme/img.sqsh",
        "size": 300_000,
        "gone": False,
        "kept": False,
    }
    done = {"done": [verified], "refused": [], "stay": [], "enough": []}
    refused = [{"code": 7, "message": f"/nvme/img.sqsh: {fault}", "absent": ""}]
    assert printed["nodes"] == [
        {"node": "node1", "problem": "", **done},
        {"node": "node2", "problem": "", **done, "done": [], "refused": refused},
        {"node": "node3", "problem": "", **done},
    ]


def _lines(*lines: str) -> str:
    return "".join(f"stage: {line}\n" for line in lines)


def test_what_was_added_to_a_folder_is_no_damage(desk: Desk) -> None:
    source = desk.folder / "set"
    (source / "sub").mkdir(parents=True)
    (source / "a").write_text("staged")
    (source / "sub/b").write_text("staged")
    (source / "sub/link").symlink_to("b")
    value = f"{source}:/nvme/set"
    assert desk.local("stage", value).code == 0
    for name in ("r1", "r2", "r3", "sub/r4"):
        desk.copy(2, f"/nvme/set/{name}").write_text("mine")
    desk.copy(3, "/nvme/set/r1").symlink_to("a")
    os.utime(desk.copy(3, "/nvme/set/a"), (1, 1))
    verified = "/nvme/set: verified on node[1-3] (3 nodes)"
    assert desk.simulated("verify") == Ran(0, _lines(verified), "")
    assert "damaged" not in desk.simulated("status").out


def test_what_was_taken_from_a_folder_is_named(desk: Desk) -> None:
    source = desk.folder / "set"
    (source / "empty").mkdir(parents=True)
    (source / "a").write_text("staged")
    (source / "link").symlink_to("a")
    assert desk.local("stage", f"{source}:/nvme/set").code == 0
    desk.copy(1, "/nvme/set/empty").rmdir()
    desk.copy(2, "/nvme/set/link").unlink()
    desk.copy(2, "/nvme/set/link").symlink_to("b")
    desk.copy(3, "/nvme/set/a").unlink()
    desk.copy(3, "/nvme/set/empty").rmdir()
    gone = "/nvme/set: folders or links in it were removed or changed:"
    replace = "keep what you changed (link) elsewhere, then stage it again with the option replace"
    assert desk.simulated("verify") == Ran(
        7,
        "",
        _lines(
            f"node1: {gone} empty; stage it again",
            f"node2: {gone} link; {replace}",
            "node3: /nvme/set: 1 file is missing, or not as staged: a; "
            "folders or links in it were removed or changed: empty; stage it again",
        ),
    )


def test_a_file_with_other_contents_and_permissions_is_named_once(desk: Desk) -> None:
    source = desk.folder / "set"
    source.mkdir()
    for name in ("a", "b"):
        (source / name).write_text("staged")
    assert desk.local("stage", f"{source}:/nvme/set").code == 0
    for name in ("a", "b"):
        desk.copy(1, f"/nvme/set/{name}").chmod(0o640)
    desk.copy(1, "/nvme/set/a").write_text("mine")
    assert desk.simulated("verify") == Ran(
        7,
        "stage: /nvme/set: verified on node[2-3] (2 nodes)\n",
        "stage: node1: /nvme/set: 1 file is missing, or not as staged: a; permissions in it were "
        "changed: b; keep what you changed (a) elsewhere, then stage it again with the option "
        "replace\n",
    )


def test_changed_permissions_in_a_folder_end_verify_with_7(desk: Desk) -> None:
    source = desk.folder / "set"
    (source / "sub").mkdir(parents=True)
    (source / "run").write_text("staged")
    (source / "run").chmod(0o755)
    os.link(source / "run", source / "twin")
    value = f"{source}:/nvme/set"
    assert desk.local("stage", value).code == 0
    desk.copy(1, "/nvme/set/twin").chmod(0o644)
    desk.copy(2, "/nvme/set/sub").chmod(0o777)
    desk.copy(3, "/nvme/set").chmod(0o750)
    changed = "/nvme/set: permissions in it were changed:"
    assert desk.simulated("verify") == Ran(
        7,
        "",
        _lines(
            f"node1: {changed} run; stage it again",
            f"node2: {changed} sub; stage it again",
            f"node3: {changed} .; stage it again",
        ),
    )
    assert desk.simulated("status", "--by", "file").out.count("damaged") == 1
    desk.copy(1, "/nvme/set/twin").chmod(0o700)
    desk.copy(2, "/nvme/set/sub").chmod(0o700)
    desk.copy(3, "/nvme/set").chmod(0o700)
    assert desk.simulated("verify").code == 0
    assert "damaged" not in desk.simulated("status").out
    assert "current on" in desk.local("stage", value).out


def test_links_pipes_and_sockets_that_were_added_to_a_folder_are_no_damage(desk: Desk) -> None:
    source = desk.folder / "set"
    source.mkdir()
    (source / "m1").write_text("staged")
    os.link(source / "m1", source / "m2")
    assert desk.local("stage", f"{source}:/nvme/set").code == 0
    os.link(desk.copy(1, "/nvme/set/m2"), desk.copy(1, "/nvme/set/a"))
    os.mkfifo(desk.copy(2, "/nvme/set/pipe"))
    desk.copy(3, "/nvme/set/m2").unlink()
    desk.copy(3, "/nvme/set/m2").write_text("staged")
    assert desk.simulated("verify") == Ran(
        7,
        _lines("/nvme/set: verified on node[1-2] (2 nodes)"),
        _lines(
            "node3: /nvme/set: folders or links in it were removed or changed: m2; keep what you "
            "changed (m2) elsewhere, then stage it again with the option replace"
        ),
    )


def _link(link: Path, target: Path | str) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def test_links_that_were_relocated_are_as_they_were_staged(desk: Desk) -> None:
    source, python = desk.folder / "env", desk.folder / "python"
    (source / "bin").mkdir(parents=True)
    python.mkdir()
    (python / "python3.11").write_text("an interpreter")
    (python / "python3").symlink_to("python3.11")
    (source / "pyvenv.cfg").write_text(f"home = {python}\n")
    (source / "bin/python3").symlink_to(python / "python3")
    (source / "lib").symlink_to(source / "bin")
    value = f"{source}:/nvme/env"
    assert desk.local("stage", value).code == 0
    staged = {"bin/python3": f"{python}/python3.11", "lib": "/nvme/env/bin"}
    for name, target in staged.items():
        assert str(desk.copy(1, f"/nvme/env/{name}").readlink()) == target
    verified = _lines("/nvme/env: verified on node[1-3] (3 nodes)")
    assert desk.simulated("verify") == Ran(0, verified, "")
    _link(desk.copy(2, "/nvme/env/bin/python3"), python / "python3.11")
    assert desk.simulated("verify") == Ran(0, verified, "")
    _link(desk.copy(3, "/nvme/env/bin/python3"), python / "python3")
    changed = "/nvme/env: folders or links in it were removed or changed: bin/python3"
    replace = "keep what you changed (bin/python3) elsewhere, then stage it again with the option"
    assert desk.simulated("verify") == Ran(
        7,
        _lines("/nvme/env: verified on node[1-2] (2 nodes)"),
        _lines(f"node3: {changed}; {replace} replace"),
    )
    assert desk.local("stage", f"{value},replace").code == 0
    assert desk.simulated("verify") == Ran(0, verified, "")
    assert "current on node[1-3] (3 nodes), nothing moved" in desk.local("stage", value).out


def _folder_at(path: Path, *names: str) -> None:
    """Replace what is at ``path`` by a folder, which has another inode, with these files."""
    new = path.with_name("new")
    for name in names:
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        (new / name).write_text("mine")
    _remove(path)
    new.rename(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _move(node: str, path: str) -> str:
    return (
        f"move it elsewhere, or delete it there if you do not need it "
        f"(srun -N1 -n1 -w {node} rm -r {path}), and stage it again"
    )


def test_nobody_is_told_to_delete_what_was_not_staged(desk: Desk) -> None:
    source = desk.folder / "set"
    source.mkdir()
    (source / "a").write_text("staged")
    (source / "b").write_text("staged")
    assert desk.local("stage", f"{source}:/nvme/set", f"{desk.source}:/nvme/img.sqsh").code == 0
    _folder_at(desk.copy(1, "/nvme/set"), "results.csv", *(f"more/{number}" for number in range(6)))
    _remove(desk.copy(2, "/nvme/set"))
    desk.copy(2, "/nvme/set").write_text("mine")
    _remove(desk.copy(3, "/nvme/set"))
    desk.copy(3, "/nvme/set").symlink_to(source)
    _folder_at(desk.copy(1), "sub/results.csv")
    _folder_at(desk.copy(2), "__pycache__/a.pyc")
    desk.copy(3).unlink()
    os.mkfifo(desk.copy(3))
    replaced = "the copy was replaced by something else"
    expected = Ran(
        7,
        "",
        _lines(
            f"node[1-3]: /nvme/img.sqsh: {replaced}; " + _move("NODE", "/nvme/img.sqsh"),
            f"node[1,3]: /nvme/set: {replaced}; " + _move("NODE", "/nvme/set"),
            f"node2: /nvme/set: {replaced}; keep what you changed (set) elsewhere, then stage it "
            "again with the option replace",
        ),
    )
    assert desk.simulated("verify") == expected
    assert "damaged" not in desk.simulated("status").out
    for node in (1, 2, 3):
        for path in ("/nvme/set", "/nvme/img.sqsh"):
            copy = desk.copy(node, path)
            copy.rename(copy.with_name(f"{copy.name}.mine"))
    ran = desk.local("stage", f"{source}:/nvme/set", f"{desk.source}:/nvme/img.sqsh")
    assert (ran.code, desk.simulated("verify").code) == (0, 0)
