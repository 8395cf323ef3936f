"""A minute of ``make campaign``, and what its parts decide."""

from __future__ import annotations

import time
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

import pytest

from tests.cluster.campaign import Campaign, Result, fit_out, outcome_of, run, wrong_messages
from tests.cluster.faults import KINDS, Fault, Moment, plan
from tests.cluster.inflict import PREEMPTION, remove
from tests.cluster.site import POLICY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cluster.site import Site

NODES = ["n1", "n2", "n3", "n4"]
#: How many seconds of faults, and of which plan: the same here as at the next run.
SECONDS, SEED = 50, 1701
#: Kinds after which Slurm itself sometimes needs minutes to end the jobs.
LATE = ("node rebooted", "slurmctld restarted")
FAULT = Fault(0, "rank killed", Moment.START, 0.5, ("n1", "n2"), "n2", "file", False, ("alice",))
WAITING = "stage: /nvme/alice-file: waiting for job 7 on n1, 1.0 s so far\n"
NOT_STARTED = "stage: the job's own program was not started (exit code 8)\n"


@pytest.fixture
def fitted_site(site: Site) -> Iterator[Site]:
    """Return the cluster with what the faults need."""
    site.reconfigure(PREEMPTION)
    fit_out(site)
    yield site
    remove(site)
    site.write_policy(POLICY)
    site.reconfigure()


@pytest.mark.nightly
def test_a_minute_of_faults_breaks_no_promise(fitted_site: Site, tmp_path: Path) -> None:
    campaign = Campaign(str(SEED), tmp_path)
    faults = (fault for fault in plan(SEED, fitted_site.nodes) if fault.kind not in LATE)
    assert not run(campaign, faults, fitted_site, time.monotonic() + SECONDS)
    violations = [one for result in campaign.results for one in result.violations]
    assert violations == []
    assert any(result.hit for result in campaign.results)


def test_a_seed_makes_the_same_plan_again() -> None:
    assert list(islice(plan(7, NODES), 200)) == list(islice(plan(7, NODES), 200))
    assert list(islice(plan(7, NODES), 200)) != list(islice(plan(8, NODES), 200))


def test_a_plan_has_every_kind_at_all_its_moments_and_a_third_in_mid_transfer() -> None:
    faults = list(islice(plan(7, NODES), 1000))
    moments = {(fault.kind, fault.moment) for fault in faults}
    assert moments == {(kind, moment) for kind, facts in KINDS.items() for moment in facts.moments}
    assert Counter(fault.moment for fault in faults)[Moment.TRANSFER] > 400
    assert {len(fault.users) for fault in faults} == {1, 2, 3}
    assert all(fault.victim in fault.nodes for fault in faults)


def test_a_campaign_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    first = Campaign("7", tmp_path)
    first.add(Result(0, "rank killed", "start", "file", True, ["code 8"], ["left: this"], 1.5))
    assert Campaign("7", tmp_path).results == first.results
    assert Campaign("8", tmp_path).results == []


@pytest.mark.parametrize(
    ("state", "code", "restarts", "outcome"),
    [
        ("COMPLETED", "0:0", "0", "completed"),
        ("COMPLETED", "0:0", "1", "completed after a requeue"),
        ("FAILED", "8:0", "0", "code 8"),
        ("FAILED", "0:9", "0", "signal 9"),
        ("CANCELLED", "0:15", "0", "cancelled"),
        ("NODE_FAIL", "0:0", "0", "node failed"),
        ("TIMEOUT", "0:0", "0", "timeout"),
    ],
)
def test_the_outcome_of_a_job(state: str, code: str, restarts: str, outcome: str) -> None:
    assert outcome_of({"JobState": state, "ExitCode": code, "Restarts": restarts}) == outcome


@pytest.mark.parametrize(
    ("output", "wrong"),
    [
        (f"stage: staging ended early: n2: it was killed; submit again\n{NOT_STARTED}", []),
        (
            f"{WAITING}slurmstepd: error: of Slurm\nstage: n1: lost\n  more of it\n{NOT_STARTED}",
            [],
        ),
        (f"stage: MPI did not start: srun ended with code 1; try again\n{NOT_STARTED}", []),
        (f"stage: waiting for MPI to start, 30.1 s so far\nstage: n1: lost\n{NOT_STARTED}", []),
        (
            f"stage: MPI does not start; the staging starts again\nstage: n1: lost\n{NOT_STARTED}",
            [],
        ),
        ("stage: n1: lost\n", ["code 8 without its last line"]),
        (NOT_STARTED, ["0 messages instead of one that begins with stage:"]),
        (
            f"stage: n1: lost\nstage: n2: lost\n{NOT_STARTED}",
            ["2 messages instead of one that begins with stage:"],
        ),
        (
            f"Traceback of something\n{NOT_STARTED}",
            ["1 messages instead of one that begins with stage:"],
        ),
        (f"stage: something is wrong\n{NOT_STARTED}", ["a message that names no place"]),
    ],
)
def test_what_is_wrong_with_the_output_of_a_failed_job(output: str, wrong: list[str]) -> None:
    assert wrong_messages(output, 8, FAULT, "alice") == wrong
