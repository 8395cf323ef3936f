"""``stagectl doctor``: how findings are printed. What is found is in tests/doctor."""

from __future__ import annotations

import json
import os

from tests.support.desk import NO_CONFIG, Desk
from tests.support.stagectl import Ran


def test_a_stage_toml_that_is_not_there_is_a_problem_among_the_findings(desk: Desk) -> None:
    desk.config.unlink()
    ran = desk.stagectl("doctor")
    assert (ran.code, ran.err) == (1, "")
    assert f"problem  {desk.config} {NO_CONFIG}" in ran.out.splitlines()


def test_an_srun_that_is_not_there_is_a_problem(desk: Desk) -> None:
    desk.config.write_text('roots = ["/nvme"]\n[launch]\nsrun = "/nowhere/srun"\n')
    ran = desk.stagectl("doctor")
    assert (ran.code, ran.err) == (1, "")
    assert (
        "problem  /nowhere/srun, which stage.toml names, is not there or cannot be run; tell the "
        "administrator to correct srun in [launch]"
    ) in ran.out.splitlines()


def test_findings_as_json_are_those_of_the_text(desk: Desk) -> None:
    text, data = desk.stagectl("doctor"), desk.stagectl("doctor", "--json")
    assert text.code == data.code
    findings = json.loads(data.out)["findings"]
    here = os.uname().nodename
    assert text.out.splitlines()[:-1] == [
        f"{one['verdict']:<8} {here + ': ' if one['nodes'] else ''}{one['text']}"
        for one in findings
    ]


def test_simulated_nodes_have_nothing_to_check(desk: Desk) -> None:
    message = "stage: simulated nodes have nothing to check; leave out --local-root\n"
    assert desk.simulated("doctor") == Ran(2, "", message)
