"""A rank of root's ends before MPI_Init, unless nobody else can reach it."""

from __future__ import annotations

import json
import subprocess

import pytest

from stager.base import linux
from stager.launch.environment import RANK

pytestmark = pytest.mark.root


def run_rank(*, alone: bool, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        RANK, env={"STAGE_REQUEST": "{}", **environment, "HOME": "/"}, capture_output=True,
        text=True, check=False, timeout=60, preexec_fn=linux.leave_network if alone else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    "claim", ['{"local_root": "/nodes"}', "{}", "not a request"], ids=["local", "real", "neither"]
)
def test_root_is_refused_whatever_the_environment_claims(claim: str) -> None:
    done = run_rank(alone=False, STAGE_REQUEST=claim, SLURMD_NODENAME="n7")
    alive, line = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (3, "")
    assert json.loads(alive) == {"event": "alive", "node": "n7"}
    assert json.loads(line)["outcome"]["failures"] == [
        {
            "code": 3,
            "message": "root cannot stage: submit as an ordinary user; to stage for all users, "
            "submit as the owner in [shared] of stage.toml",
            "node": "n7",
        }
    ]


def test_in_a_network_of_its_own_it_goes_on() -> None:
    done = run_rank(alone=True)
    assert "KeyError" in done.stderr, "it read the request, which says nothing"
    assert "root cannot stage" not in done.stdout
