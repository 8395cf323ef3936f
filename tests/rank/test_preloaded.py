"""A rank with a key for its connections does not run without the library that uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: A rank that says when it would load MPI, and ends there.
RANK = """
import sys
class Mpi:
    def find_spec(self, name, path, target=None):
        if name == "mpi4py":
            print("loads MPI", flush=True)
            sys.exit(0)
sys.meta_path.insert(0, Mpi())
from stager.base.linux import leave_network
import os
if os.getuid() == 0:
    leave_network()
from stager.rank.__main__ import main
main()
"""
KEY = {"STAGE_PEER_KEY": "00" * 16, "SLURMD_NODENAME": "n3"}


def run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RANK], env=os.environ | environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("preload", ["", "{}/absent/lib/stage_peers.so"], ids=["none", "absent"])
def test_a_rank_without_its_library_tells_the_launcher_and_ends(
    preload: str, tmp_path: Path
) -> None:
    done = run(KEY | {"LD_PRELOAD": preload.format(tmp_path)})
    alive, result = map(json.loads, done.stdout.splitlines())
    assert (done.returncode, alive["event"], result["event"]) == (8, "alive", "result")
    (failure,) = result["outcome"]["failures"]
    assert failure == {
        "code": 8,
        "message": f"{sys.prefix}/lib/stage_peers.so cannot be loaded, without which ranks accept "
        "connections from anyone; tell the administrator to install slurm-stage there again",
        "node": "n3",
    }


def test_a_rank_with_its_library_goes_on(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "prolog/peers"
    subprocess.run(["make", "--silent", "-C", source, f"BUILD={tmp_path}/lib"], check=True)
    done = run(KEY | {"LD_PRELOAD": f"{tmp_path}/lib/stage_peers.so"})
    assert done.stdout.splitlines()[1:] == ["loads MPI"]


def test_a_rank_without_a_key_needs_no_library() -> None:
    assert run({"SLURMD_NODENAME": "n3"}).stdout.splitlines()[1:] == ["loads MPI"]
