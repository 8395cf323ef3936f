"""``stagectl demo``: a stage, a second one that moves nothing, and the records."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from stager.cli import stage
from tests.support.desk import call, untimed, without_free_space

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_demo_stages_twice_and_shows_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "_SIZE", 1 << 20)
    ran = untimed(call(["demo", "--nodes", "2"], tmp_path))
    out = re.sub(r"/\S*/stage-demo-[^/]*", "TMP", without_free_space(ran.out))
    assert (ran.code, ran.err) == (0, "")
    assert (
        re.sub(" +", " ", out)
        == """
# no node has the file
$ stagectl stage --local 2 TMP/img.sqsh:/nvme/img.sqsh
stage: /nvme/img.sqsh: 1.0 MiB from TMP/img.sqsh to node[1-2] (2 nodes) in T (R a node)

# every node has it, nothing moves
$ stagectl stage --local 2 TMP/img.sqsh:/nvme/img.sqsh
stage: /nvme/img.sqsh: current on node[1-2] (2 nodes), nothing moved (1.0 MiB, T)

# what the nodes hold
$ stagectl status --local-root TMP/nodes
NODE DST SIZE STAGED STATE KEPT SOURCE LAST JOB
node[1-2] /nvme/img.sqsh 1.0 MiB T ago ready - TMP/img.sqsh -
1 file, 2 copies, 2.0 MiB in all
"""
    )
