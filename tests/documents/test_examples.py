"""Each example of stage.toml allows the line that it names, in a job that was restarted once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stager.request import policy
from stager.request.grammar import parse_value
from stager.request.resolve import resolve
from stager.request.script import sbatch_values
from tests.support.directives import NAMES

EXAMPLES = Path(__file__).parents[2] / "slurm-config/examples"
LETTERS = {"u": "alice", "U": "1000", "j": "17", "A": "17", "x": "train", "r": "1"}
PLACES = {
    "fixed-folder": ("/nvme", "/nvme/alice/img.sqsh", False),
    "job-folder": ("/localscratch/alice.17.1", "/localscratch/alice.17.1/img.sqsh", True),
    "asked-for": ("/run/nvme/job_17/data", "/run/nvme/job_17/data/img.sqsh", True),
    "private-tmp": ("/tmp", "/tmp/img.sqsh", True),
    "user-folder": ("/lscratch/alice", "/lscratch/alice/img.sqsh", True),
    "shared-fs": ("/mnt/stage/17", "/mnt/stage/17/train", False),
    "memory": ("/tmp/scratch/17", "/tmp/scratch/17/img.sqsh", True),
}


def test_all_examples_are_tried() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == {f"{name}.toml" for name in PLACES}


@pytest.mark.parametrize("name", PLACES)
def test_the_line_that_an_example_names_is_allowed(name: str) -> None:
    path = EXAMPLES / f"{name}.toml"
    rules = policy.load(path)
    script = [line.removeprefix("#   ") for line in path.read_text().splitlines()]
    (value,) = sbatch_values(script)
    names = replace(NAMES, letters=LETTERS, variables=rules.variables)
    here = rules.at(LETTERS)
    (item,) = resolve(parse_value(value, names), here)
    assert (item.root, item.destination, item.root in here.private_roots) == PLACES[name]
