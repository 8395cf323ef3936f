"""How many nodes of a job may fail, from an option and stage.toml."""

from __future__ import annotations

import pytest

from stager.launch.tolerate import Tolerated, safe_after, tolerated
from stager.request.policy import Policy

RULES = Policy.model_validate(
    {"roots": ["/nvme"], "launch": {"tolerate": 1, "tolerate_limit": "25%"}}
)


@pytest.mark.parametrize(
    ("text", "nodes", "most", "asked"),
    [
        ("2", 64, 2, "--stage-tolerate=2"),
        ("2", 7, 1, "--stage-tolerate=2, and this site allows 25%"),
        ("10%", 39, 3, "--stage-tolerate=10%"),
        ("0", 64, 0, "--stage-tolerate=0"),
        ("", 64, 1, "tolerate = 1 in stage.toml"),
        ("", 3, 0, "tolerate = 1 in stage.toml, and this site allows 25%"),
    ],
)
def test_the_smaller_of_what_is_asked_and_the_sites_limit_counts(
    text: str, nodes: int, most: int, asked: str
) -> None:
    found = tolerated(text, RULES, nodes)
    assert found == Tolerated(most, asked)


@pytest.mark.parametrize(
    ("nodes", "seconds"),
    [(1, 0), (6, 0), (7, 5), (8, 5), (9, 8), (57, 8), (58, 11), (101, 16), (4000, 22)],
)
def test_a_job_ends_later_than_slurm_drains_nodes_for(nodes: int, seconds: float) -> None:
    assert safe_after(nodes) == seconds
