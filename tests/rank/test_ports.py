"""A rank does not run where another user has taken all ports that the site names for MPI."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from stager.rank.start import named_ports

FIRST, COUNT = "OMPI_MCA_btl_tcp_port_min_", "OMPI_MCA_btl_tcp_port_range_"
#: A rank that says when it would load MPI, and ends there; some ports are taken.
RANK = """
import os, socket, sys
class Mpi:
    def find_spec(self, name, path, target=None):
        if name == "mpi4py":
            print("loads MPI", flush=True)
            sys.exit(0)
from stager.base.linux import leave_network
if os.getuid() == 0:
    leave_network()
taken = [socket.create_server(("", int(port))) for port in sys.argv[1:]]
sys.meta_path.insert(0, Mpi())
from stager.rank.__main__ import main
main()
"""


def run(taken: range, environment: dict[str, str]) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", RANK, *map(str, taken)], check=False, stdout=subprocess.PIPE,
        env=os.environ | {"SLURMD_NODENAME": "n3"} | environment, text=True,
    ).stdout.splitlines()  # fmt: skip


def test_a_rank_without_a_free_port_tells_the_launcher_which_and_ends() -> None:
    lines = run(range(9100, 9105), {f"{FIRST}v4": "9100", f"{COUNT}v4": "5"})
    assert json.loads(lines[1])["outcome"]["failures"] == [
        {
            "code": 8,
            "message": "MPI cannot start here: each port from 9100 to 9104 is taken, and "
            f"{FIRST}v4 and {COUNT}v4 in [launch] environment of stage.toml name no others; use "
            "other nodes (--exclude), and tell the administrator to see whose they are, and to "
            "name some ten thousands",
            "node": "n3",
        }
    ]


@pytest.mark.parametrize(
    "environment",
    [
        {f"{FIRST}v4": "9100", f"{COUNT}v4": "6"},
        {f"{FIRST}v4": "9100"},
        {f"{FIRST}v4": "x", f"{COUNT}v4": "5"},
        {f"{COUNT}v4": "5"},
    ],
)
def test_a_rank_with_a_free_port_goes_on(environment: dict[str, str]) -> None:
    assert run(range(9100, 9105), environment)[1:] == ["loads MPI"]


def test_ports_end_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{FIRST}v6", "65000")
    assert named_ports("v6") == range(65000, 65536)
    monkeypatch.setenv(f"{COUNT}v6", "9000")
    assert named_ports("v6") == range(65000, 65536)
