"""Of the processes that run one command line on all nodes, one is the first; all know which."""

from __future__ import annotations

import pytest

from stager.launch.schedulers import Line, find_line

HOSTS = ("n1", "n2")
VALUES = ("/shared/a:/nvme/a",)


def found(environment: dict[str, str], *hosts: str) -> Line:
    line = find_line(environment, hosts, VALUES)
    assert line
    return line


@pytest.mark.parametrize(
    "variable",
    ["DSTACK_NODE_RANK", "JOB_COMPLETION_INDEX", "PET_NODE_RANK", "GROUP_RANK", "NODE_RANK"],
)
def test_the_nodes_of_a_launcher_are_numbered(variable: str) -> None:
    first, second = (found({variable: str(rank)}, *HOSTS) for rank in range(2))
    assert (first.later, second.later) == ("", f"{variable} is 1")
    assert first.name == second.name
    assert find_line({variable: "1"}, (), VALUES) is None  # the job of Slurm that exports it
    assert find_line({variable: "first"}, HOSTS, VALUES) is None


def test_the_workers_of_a_node_are_numbered_too() -> None:
    environment = {"GROUP_RANK": "0", "LOCAL_RANK": "2", "TORCHELASTIC_RUN_ID": "9"}
    assert found(environment, *HOSTS).later == "LOCAL_RANK is 2"
    assert found(environment, *HOSTS).task == "0-2"
    assert find_line({"LOCAL_RANK": "2"}, HOSTS, VALUES) is None


def test_another_run_other_hosts_and_values_are_another_line() -> None:
    node = {"DSTACK_NODE_RANK": "1", "DSTACK_RUN_ID": "a"}
    lines = [
        find_line(environment, hosts, values)
        for environment, hosts, values in (
            (node, HOSTS, VALUES),
            (node | {"DSTACK_RUN_ID": "b"}, HOSTS, VALUES),
            (node, ("n1",), VALUES),
            (node, HOSTS, ("/shared/b:/nvme/a",)),
        )
    ]
    assert len({line.name for line in lines if line}) == len(lines)
    assert find_line({}, HOSTS, VALUES) is None
