"""What ``--json`` prints: its keys and types are those of the files in ``json/``.

After a wanted change, `python -m tests.cli.test_json` writes these files anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import pytest

from stager.archive.create import Packed
from stager.base.outcome import NodeRates, Outcome, Rate
from stager.cli.main import COMMANDS
from stager.doctor.finding import Verdict
from stager.node.agent import NodeResult
from stager.node.user_folders import Prepared
from stager.store.states import DiskRoom, Entry, SharedRoom, Unread
from tests.support.desk import call
from tests.support.schema import faults, schema

if TYPE_CHECKING:
    from tests.support.desk import Desk
    from tests.support.stagectl import Ran

FOLDER = Path(__file__).with_name("json")
_VERSION = {"version": int}
_NODE = {"node": str, "problem": str}
#: Only a job can go on without nodes, and its gate prints no JSON.
_OUTCOME = {key: kind for key, kind in get_type_hints(Outcome).items() if key != "failed_nodes"}
_STAGED = (_VERSION, _OUTCOME, {"code": int, "launcher?": str})
_OF_COPIES = (_VERSION, {"nodes": [_NODE, NodeResult], "dry_run": bool, "code": int})
_STATUS = {"state": str, "entries": [Entry], "roots": [DiskRoom], "unreadable": [Unread],
           "silent": [int], "shared": SharedRoom}  # fmt: skip
_FINDING = {"name": str, "state": Verdict, "nodes": [str], "text": str, "remedy": str}
_SITE: dict[str, Any] = {
    "config": str, "roots": [str], "destinations": [str], "variables": dict[str, str],
    "hints": dict[str, str], "lock_timeout": float, "allow_share": str,
    "cache": {"keep_free": int | str, "headroom": int | str, "user_limit": int | str,
              "store": str, "size": int | str,
              "unpacked_size": int, "unpacked_members": int},
    "shared": {"roots": [str], "owner": str | None},
    "shared_fs": {"mount": str},
    "launch": {"tolerate": str, "tolerate_limit": str},
    "source": {"allow": [str], "endpoints": [str], "insecure_registries": [str], "limit": int},
}  # fmt: skip
#: What each command's answer is made of.
ANSWERS: dict[str, tuple[Any, ...]] = {
    "bench": (*_STAGED, {"rates": [Rate], "nodes": [NodeRates]}),
    "doctor": (_VERSION, {"findings": [_FINDING]}),
    "evict": _OF_COPIES,
    "pack": (_VERSION, Packed, {"options": [str], "seconds": float}),
    "pin": _OF_COPIES,
    "plan": _STAGED,
    "prepare": (_VERSION, {"nodes": [_NODE, {"roots": [Prepared]}], "code": int}),
    "site": (_VERSION, _SITE),
    "stage": _STAGED,
    "status": (_VERSION, {"nodes": [_NODE, _STATUS], "missing": dict[str, list[str]]}),
    "unpin": _OF_COPIES,
    "verify": _OF_COPIES,
}


def text_of(command: str) -> str:
    return json.dumps(schema(*ANSWERS[command]), indent=1) + "\n"


def check(command: str, ran: Ran) -> None:
    printed = json.loads(ran.out)
    assert printed["version"] == 1
    assert faults(printed, json.loads((FOLDER / f"{command}.json").read_text())) == []


@pytest.mark.parametrize("command", ANSWERS)
def test_the_schema_of_a_command_is_that_of_its_types(command: str) -> None:
    assert (FOLDER / f"{command}.json").read_text() == text_of(command)


def test_all_commands_with_json_have_a_schema() -> None:
    without = {"check", "demo", "gate", "help", "importer", "node"}
    assert {*ANSWERS} == {*COMMANDS} - without == {path.stem for path in FOLDER.iterdir()}


def test_a_stage_and_what_is_asked_of_its_copies(staged: tuple[Desk, Ran]) -> None:
    desk, ran = staged
    check("stage", ran)
    check("plan", desk.local("plan", "--json", f"{desk.source}:/nvme/other"))
    nodes = ["--json", "--local-root", str(desk.nodes)]
    check("status", desk.stagectl("status", *nodes))
    for command in ("verify", "pin", "unpin"):
        check(command, desk.stagectl(command, "/nvme/img.sqsh", *nodes))
    check("evict", desk.stagectl("evict", "/nvme/img.sqsh", "--dry-run", *nodes))


def test_a_failed_stage(desk: Desk) -> None:
    check("stage", desk.local("stage", "--json", "/nowhere/img:/nvme/img"))


def test_what_is_asked_of_the_site_and_this_node(desk: Desk) -> None:
    (desk.folder / "set").mkdir()
    (desk.folder / "set/a").write_bytes(b"x" * 5000)
    check("pack", call(["pack", "--json", "set"], desk.folder))
    for command in ("site", "doctor"):
        check(command, desk.stagectl(command, "--json"))
    check("bench", desk.local("bench", "--size", "1", "--json"))


if __name__ == "__main__":
    for name in ANSWERS:
        (FOLDER / f"{name}.json").write_text(text_of(name))
