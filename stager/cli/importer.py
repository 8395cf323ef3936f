"""``stagectl importer``: what pyxis calls to get the file of a container image on a node.

pyxis calls it on the nodes of a step at once, as the user. The first node asks the registry for the
image's digest and has it staged to all nodes of the step, as ``--stage`` would; the others wait for
that. pyxis does not call it on a node that has the container already: if nothing happens, the
second node takes over from the first, and so on. Before ranks start, a node cannot know whether
another is at work, or waits for a slow registry: then several ask, but each takes a stage that
another has begun instead of its own. stdout is for the path of the file alone, and pyxis shows
stderr only after a failure.
"""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from stager.base.errors import LaunchError, StageError, UsageError
from stager.cli.render import print_outcome
from stager.cli.shared_options import config_option
from stager.cli.terminal import complain
from stager.launch import job
from stager.launch.credentials import with_credentials
from stager.launch.job import FOLDERS
from stager.launch.targets import JobNodes, end_step
from stager.node.job_state import wait_for_code
from stager.request.grammar import Directive
from stager.request.items import Waiting
from stager.request.resolve import build_request, images_folder, resolve
from stager.source.image_name import ImageName, from_enroot

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from stager.request.policy import Policy

#: Nodes that may stage: the first ones of the step.
_CANDIDATES = 8
#: Seconds by which each of them asks the registry later than the one before, if no ranks have
#: started: mostly a registry has answered by then, and ranks have started.
_TURN = 20
#: Seconds by which each of them then starts ranks later than the one before, if no others have
#: started: a slow registry may answer all of them at once.
_GRACE = 5


@click.command(hidden=True)
@config_option
@click.argument("verb", type=click.Choice(["get", "release"]))
@click.argument("uri", default="")
def importer(config: Path, verb: str, uri: str) -> int:
    """Print the path of a squashfs file of the image, or end its use, as pyxis asks."""
    if verb == "release":
        return 0  # the job keeps its copies from eviction until it ends
    step = _Step.of(os.environ)
    if step.node < _CANDIDATES:
        ended = step.wait_for_others(step.node * _TURN)
        return _tell(*ended) if ended else _import(config, uri, step)
    from stager.request import policy  # not for the first nodes

    ended = step.wait_for_others(_longest_wait(policy.load(config)))
    if ended:
        return _tell(*ended)
    raise LaunchError("none of the first nodes of the step has staged the image; submit again")


def _longest_wait(rules: Policy) -> float:
    """Return the seconds within which the ranks of some node have started, if any was called."""
    # A registry is asked for two manifests at most: for each as long as its patience lasts, and a
    # last time, which may take as long again.
    asks = 4 * rules.source.patience
    return _CANDIDATES * (_TURN + _GRACE) + asks + rules.launch.start_timeout


@dataclass(frozen=True, slots=True)
class _Step:
    """The step whose containers wait for the image; ``number`` is empty in the batch step."""

    job: int
    restart: str
    number: str
    #: The number of this node in the step, from 0.
    node: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> _Step:
        """Return the step of this process. Raise UsageError outside of a job."""
        node = environment.get("SLURM_NODEID", "")
        return cls(
            job.number(environment),
            environment.get("SLURM_RESTART_COUNT") or "0",
            environment.get("SLURM_STEP_ID", ""),
            int(node) if node.isdecimal() else 0,
        )

    def status_name(self, node: int) -> str:
        """Return the name of the status that ``node`` has written, empty if nobody waits for it.

        It is not that of the step's ``--stage``.
        """
        return f"{self.job}.{self.restart}.import{self.number}-{node}" if self.number else ""

    def wait_for_others(self, patience: float) -> tuple[int, str] | None:
        """Wait for the stage that another node has begun, if it has or does within ``patience``.

        Return its exit code, and the path of the image.
        """
        if not self.number:
            return None  # the batch step has one node
        others = [self.status_name(node) for node in range(_CANDIDATES) if node != self.node]
        return wait_for_code(os.getuid(), others, self.number, patience)


def _import(config: Path, uri: str, step: _Step) -> int:
    """Stage the image to all nodes and print its path, else say why not."""
    try:
        nodes = JobNodes.find(config, of_step=bool(step.number))
        directive = _pinned(_url(uri), nodes.rules)
        if ended := step.wait_for_others(step.node * _GRACE):
            return _tell(*ended)
        code = _stage(nodes, directive, step)
    except StageError as error:
        complain(str(error))
        return _give_up(config, step, error.code)
    return _give_up(config, step, code) if code == LaunchError.code else code


def _stage(nodes: JobNodes, directive: Directive, step: _Step) -> int:
    name = step.status_name(step.node)
    waiting = Waiting(name, step.number) if name else None
    items = resolve([directive], nodes.rules)
    request = build_request(items, nodes.rules, waiting=waiting)
    outcome = nodes.run(request, lambda _: None)
    print_outcome(outcome, complain, complain)
    if not outcome.code:
        click.echo(directive.destination)
    return outcome.code


def _give_up(config: Path, step: _Step, code: int) -> int:
    """Return ``code``; if another node has staged meanwhile, take its stage instead.

    The first node ends the step, since no rank may have ended the wait of the other nodes. If
    another one fails, the first may still wait for the registry, or the next one takes over.
    """
    if ended := step.wait_for_others(0):
        return _tell(*ended)
    if step.number and not step.node:
        end_step(config, step.number)
    return code


def _url(uri: str) -> str:
    try:
        return from_enroot(uri)
    except ValueError as error:
        raise UsageError(f"the image {uri} {error}") from None


def _pinned(url: str, rules: Policy) -> Directive:
    """Return the directive for the image that ``url`` names now, with a file of its own.

    A tag may move while other jobs still use what it named before. Raise SourceError, and
    PolicyRefusal for what the site does not allow.
    """
    name = ImageName.parse(url)
    account = _account()
    folder = images_folder(os.getuid(), rules)
    resolve([Directive(url, f"{folder}/{name.file_name}")], rules)
    home = {"HOME": account.pw_dir} if account else {}  # it is unset with --export=NONE
    path = ":".join((*FOLDERS, os.environ.get("PATH", "")))
    os.environ.update(with_credentials({**home, **os.environ}, [url]), PATH=path)
    digest = name.digest
    if not digest:
        from stager.source.registry import look_at_image

        digest = look_at_image(url, rules.source.settings).facts.revision
    url = name.pinned(digest)
    return Directive(url, f"{folder}/{ImageName.parse(url).file_name}")


def _account() -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(os.getuid())
    except KeyError:
        return None


def _tell(code: int, path: str) -> int:
    """Print the path of the image that another node has staged, or that it failed."""
    if code:
        complain(
            f"the image was not staged (exit code {code}): the node that staged it for this "
            "step, mostly the first, says why"
        )
        return code
    if not path:
        complain("the path of the image is not known on this node; submit again")
        return LaunchError.code
    click.echo(path)
    return 0
