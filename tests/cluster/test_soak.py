"""Half a minute of ``make soak``, which runs for ten."""

from __future__ import annotations

import random
from itertools import islice
from typing import TYPE_CHECKING

import pytest

from tests.cluster.soak import moved_again, plan, soak

if TYPE_CHECKING:
    from tests.cluster.site import Site

NODES = ["n1", "n2", "n3", "n4"]


@pytest.mark.nightly
def test_half_a_minute_of_random_jobs_finds_no_fault(site: Site) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    tally = soak(site, seed, seconds=30)
    assert tally.faults == [], f"seed {seed}"
    # The number of jobs depends on the machine.
    assert tally.counts["completed"] > 0
    assert tally.counts["moves"] > 0


def test_a_seed_makes_the_same_choices_again() -> None:
    assert list(islice(plan(7, NODES), 200)) == list(islice(plan(7, NODES), 200))
    assert list(islice(plan(7, NODES), 200)) != list(islice(plan(8, NODES), 200))


def test_a_file_that_moves_to_a_node_twice_is_found() -> None:
    first = (
        "stage: /nvme/bob-0: 12.3 MiB from /shared/soak/bob-0 to n[1-2] (2 nodes) in 0.3 s (1/s)\n"
        "stage: /nvme/bob-2: 1.0 MiB from /shared/soak/bob-2 to n2 in 0.3 s (1/s)\n"
    )
    other = "stage: /nvme/bob-0: 9.1 MiB from the copy on n1 to n2 in 0.3 s (1/s); current on n1\n"
    assert moved_again([first, other, "stage: /nvme/bob-0: current on n2, nothing moved\n"]) == []
    assert moved_again([first, other, first]) == [
        ("n1", "bob-0", "12.3 MiB"),
        ("n2", "bob-0", "12.3 MiB"),
    ]
