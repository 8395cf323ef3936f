"""``stagectl importer``: what pyxis calls for an image, on the nodes of a step at once.

Each node is a process. The registry and the ranks are played; scancel notes what it is asked for.
The real ones are in ``cluster/test_images.py``.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import Failure, SourceError
from stager.base.outcome import Outcome
from stager.cli import importer
from stager.launch.targets import JobNodes
from stager.node.job_state import StepStatus
from stager.request.grammar import Directive
from stager.request.policy import Policy
from stager.source.image_name import ImageName
from tests.support.desk import JOB, OUTSIDE, Desk
from tests.support.stagectl import Ran

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from stager.request.items import StageRequest

NOT_ALLOWED = (
    "docker://docker.io/library/ubuntu: this site stages from no URL; copy it to the shared "
    "storage first, or ask the administrator (allow in [source] of stage.toml)"
)
NO_REGISTRY = "the image dockerd://a names no registry; write docker://REGISTRY#NAME:TAG"
IMAGE = "/nvme/images/a.sqsh"
NO_PATH = "the image is not in the registry"
FULL = "no space"
GOT = Ran(0, f"{IMAGE}\n", "")
NOT_STAGED = (
    "stage: the image was not staged (exit code 5): the node that staged it for this step, mostly "
    "the first, says why\n"
)
NOBODY = "stage: none of the first nodes of the step has staged the image; submit again\n"
ENDED = "scancel --signal=TERM 17.3"


@dataclass
class Step:
    """A step with the importer on some nodes: by node, how the registry and the ranks behave."""

    desk: Desk
    #: Seconds that the registry takes to answer; with those of ``refused`` it then has no image.
    answers_after: dict[int, float] = field(default_factory=dict)
    refused: Collection[int] = ()
    #: The exit code on which the ranks agree, and the seconds that they take.
    code: int = 0
    stage_takes: float = 0.5
    #: Whether the ranks begin, and so tell all nodes how it ended.
    begins: bool = True

    def get(self, *nodes: int) -> list[Ran]:
        """Run the importer on these nodes at once; return how it ended on each."""
        with ProcessPoolExecutor(len(nodes), mp_context=get_context("fork")) as pool:
            return list(pool.map(partial(get, self.desk), nodes))

    @property
    def noted(self) -> list[str]:
        """What was done, in turn: which node asked, which staged; and calls of scancel."""
        return (self.desk.folder / "noted").read_text().splitlines()

    def note(self, deed: str) -> None:
        with (self.desk.folder / "noted").open("a") as file:
            file.write(f"{deed} {own_node()}\n")

    def ask(self, url: str, _: Policy) -> Directive:
        """Play the registry."""
        self.note("asks")
        time.sleep(self.answers_after.get(own_node(), 0))
        if own_node() in self.refused:
            raise SourceError(NO_PATH)
        return Directive(url, IMAGE)

    def run_ranks(self, request: StageRequest, _: Callable[..., None]) -> Outcome:
        """Play the ranks of all nodes: their files of the step's status are one here."""
        self.note("stages")
        if self.begins:
            status = StepStatus(os.getuid())
            assert request.waiting
            status.hold(request.waiting.status_file, request.waiting.step)
            time.sleep(self.stage_takes)
            status.write(self.code, request.items[0].destination)
            status.close()
        return Outcome([], [Failure(self.code, FULL, "n1")] if self.code else [], 0.1)


def own_node() -> int:
    return int(os.environ["SLURM_NODEID"])


def get(desk: Desk, node: int) -> Ran:
    variables = {**JOB, "SLURM_STEP_ID": "3", "SLURM_NODEID": str(node)}
    return desk.stagectl("importer", "get", "docker://site.org/a", **variables)


@pytest.fixture
def step(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Step:
    step = Step(desk)
    (tmp_path / "run" / str(os.getuid())).mkdir(parents=True)
    (tmp_path / "noted").touch()
    scancel = tmp_path / "scancel"
    scancel.write_text(f'#!/bin/sh\necho scancel "$@" >>{tmp_path}/noted\n')
    scancel.chmod(0o755)
    desk.config.write_text(
        f'roots = ["/nvme"]\n[launch]\nsrun = "{tmp_path}/srun"\n'
        '[source]\nallow = ["docker://site.org/"]\n'
    )
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", f"{tmp_path}/run")
    monkeypatch.setattr(importer, "_pinned", step.ask)
    monkeypatch.setattr(JobNodes, "run", step.run_ranks)
    return step


def take_turns(monkeypatch: pytest.MonkeyPatch, turn: float, grace: float) -> None:
    monkeypatch.setattr(importer, "_TURN", turn)
    monkeypatch.setattr(importer, "_GRACE", grace)


def test_the_first_node_stages_for_more_nodes_than_may_stage(step: Step) -> None:
    assert step.get(0, 1, 7, 8, 9) == [GOT] * 5
    assert step.noted == ["asks 0", "stages 0"]


def test_the_second_node_takes_over_from_a_first_that_is_not_called(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_turns(monkeypatch, 2, 0.1)
    assert step.get(1, 2, 9) == [GOT] * 3
    assert step.noted == ["asks 1", "stages 1"]


def test_all_nodes_end_with_the_code_of_the_stage_and_say_who_knows_more(step: Step) -> None:
    step.code = 5
    assert step.get(0, 1, 9) == [Ran(5, "", f"stage: n1: {FULL}\n"), *[Ran(5, "", NOT_STAGED)] * 2]
    assert step.noted == ["asks 0", "stages 0"]


@pytest.mark.parametrize("reason", ["the registry", "the ranks"])
def test_a_failure_that_no_node_is_told_of_ends_the_step(step: Step, reason: str) -> None:
    if reason == "the registry":
        step.refused = [0]
        assert step.get(0) == [Ran(4, "", f"stage: {NO_PATH}\n")]
        assert step.noted == ["asks 0", ENDED]
    else:
        step.begins, step.code = False, 8
        assert step.get(0) == [Ran(8, "", f"stage: n1: {FULL}\n")]
        assert step.noted == ["asks 0", "stages 0", ENDED]


@pytest.mark.parametrize("refused", [False, True], ids=["answered late", "refused late"])
def test_a_first_node_that_waits_for_the_registry_takes_the_stage_of_the_second(
    step: Step, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    take_turns(monkeypatch, 0.5, 0.1)
    step.answers_after, step.stage_takes = {0: 1.5}, 2
    step.refused = [0] if refused else []
    told = f"stage: {NO_PATH}\n" if refused else ""
    assert step.get(0, 1) == [Ran(0, f"{IMAGE}\n", told), GOT]
    assert step.noted == ["asks 0", "asks 1", "stages 1"]


def test_a_second_node_that_cannot_ask_does_not_end_the_first_which_waits_for_the_registry(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_turns(monkeypatch, 0.5, 0.1)
    step.answers_after, step.refused = {0: 1.5}, [1]
    assert step.get(0, 1) == [GOT, Ran(4, "", f"stage: {NO_PATH}\n")]
    assert step.noted == ["asks 0", "asks 1", "stages 0"]


def test_of_all_that_a_slow_registry_answers_at_once_the_first_one_stages(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_turns(monkeypatch, 0.1, 2)
    step.answers_after = {0: 1.5, 1: 1.4, 2: 1.3}
    assert step.get(0, 1, 2, 9) == [GOT] * 4
    assert sorted(step.noted) == ["asks 0", "asks 1", "asks 2", "stages 0"]


def test_a_node_that_may_not_stage_gives_up_when_no_other_can_be_at_work(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_turns(monkeypatch, 0.01, 0.01)
    rules = step.desk.config.read_text()
    step.desk.config.write_text(f"{rules}patience = 0.1\n")
    text = step.desk.config.read_text().replace("[launch]\n", "[launch]\nstart_timeout = 0.1\n")
    step.desk.config.write_text(text)
    assert step.get(8, 9) == [Ran(8, "", NOBODY)] * 2
    assert step.noted == []


def test_release_does_nothing(desk: Desk) -> None:
    assert desk.stagectl("importer", "release") == Ran(0, "", "")


@pytest.mark.parametrize(
    ("uri", "variables", "code", "message"),
    [
        ("docker://ubuntu", {}, 2, OUTSIDE),
        ("dockerd://a", JOB, 2, NO_REGISTRY),
        ("docker://ubuntu", JOB, 3, NOT_ALLOWED),
    ],
    ids=["outside of a job", "no registry", "not allowed"],
)  # fmt: skip
def test_what_cannot_be_got_is_told(
    desk: Desk, uri: str, variables: dict[str, str], code: int, message: str
) -> None:
    assert desk.stagectl("importer", "get", uri, **variables) == Ran(
        code, "", f"stage: {message}\n"
    )


def test_a_file_is_named_by_the_digest_though_a_tag_stands_before_it() -> None:
    digest = f"sha256:{'ab' * 32}"
    rules = Policy.model_validate({"roots": ["/nvme"], "source": {"allow": ["docker://"]}})
    directive = importer._pinned(f"docker://site.org/team/box:v1@{digest}", rules)
    assert directive.source == f"docker://site.org/team/box@{digest}"
    name = ImageName.parse(directive.source).file_name
    assert directive.destination.endswith(f"/{name}")
    assert "v1" not in name
