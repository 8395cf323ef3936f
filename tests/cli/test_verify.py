"""``stagectl verify``: copies that are well, and one that is damaged."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from tests.support.stagectl import Ran

if TYPE_CHECKING:
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
    verified = {"destination": "/nvme/img.sqsh", "size": 300_000, "own": 0, "names": []}
    done = {"done": [verified], "refused": [], "stay": []}
    refused = [{"code": 7, "message": f"/nvme/img.sqsh: {fault}", "absent": ""}]
    assert printed["nodes"] == [
        {"node": "node1", "problem": "", **done},
        {"node": "node2", "problem": "", "done": [], "refused": refused, "stay": []},
        {"node": "node3", "problem": "", **done},
    ]
