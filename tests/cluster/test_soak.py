"""A minute of what `make soak` does for ten."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.cluster.soak import soak

if TYPE_CHECKING:
    from tests.cluster.site import Site


def test_a_minute_of_random_jobs_and_kills_leaves_nothing_wrong(site: Site) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    tally = soak(site, seed, seconds=40, kills=4)
    assert tally.faults == [], f"seed {seed}"
    assert tally.counts["jobs"] >= 20
    assert tally.counts["moves"] > 0
