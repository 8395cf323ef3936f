"""Find the nodes that a command is about, and bring it to each of them."""

from __future__ import annotations

import os
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from stager.base.codec import codec_of
from stager.base.errors import StageError, UsageError
from stager.base.interfaces import name_here
from stager.cli.arguments import absolute
from stager.launch import job, nodes
from stager.launch.nodes import Answer
from stager.launch.schedulers import choose, read_text
from stager.node.agent import answer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stager.cli.options import NodeOptions
    from stager.launch.job import JobContext
    from stager.node.agent import Command
    from stager.request.policy import Policy

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Scope:
    """The nodes that a command is about.

    ``disks`` maps the nodes whose disks this process sees to the folders where it sees them. The
    other ``nodes`` are asked; those of the job ``context`` by a step, which sees what the job sees.
    ``whole_job`` says that the nodes are all nodes of one job, and ``other_job`` is its number if
    this process is not in it.
    """

    disks: dict[str, str] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)
    context: JobContext | None = None
    whole_job: bool = False
    other_job: int = 0

    @property
    def is_here_alone(self) -> bool:
        """Whether only this machine is asked."""
        return not self.nodes and [*self.disks.values()] == [""]

    @classmethod
    def find(cls, where: NodeOptions, environment: Mapping[str, str], srun: str) -> Scope:
        """Return the nodes that the options and the environment mean. Raise StageError.

        ``srun`` is that of stage.toml, beside which Slurm's other commands are.
        """
        given = (where.nodes, where.job_id, where.local_root, where.hostfile, where.launcher)
        if sum(map(bool, given)) > 1:
            raise UsageError(
                "use only one of --nodes, --job, --hostfile, --launcher and --local-root"
            )
        if where.local_root:
            return cls.of_simulated(where.local_root)
        if not where.nodes and not where.job_id:
            file, launcher = str(where.hostfile or ""), where.launcher or ""
            _, hosts = choose(environment, read_text, hosts="", file=file, launcher=launcher)
            if hosts:
                return cls.of_hosts(hosts.names)
        here = job.own_name(environment)
        context = None
        whole_job = True
        if where.nodes:
            names = job.unfold(where.nodes)
            whole_job = False
            with suppress(StageError):  # outside of a job
                context = job.find(environment, srun)
        elif where.job_id and environment.get("SLURM_JOB_ID") != str(where.job_id):
            return cls._of_other(where.job_id, environment, srun)
        elif environment.get("SLURM_JOB_ID"):
            context = job.find(environment, srun)
            names = job.unfold(context.nodes)
        else:
            names = [here]
        if names == [here]:
            return cls(disks={here: ""})
        return cls(nodes=names, context=context, whole_job=whole_job)

    @classmethod
    def _of_other(cls, number: int, environment: Mapping[str, str], srun: str) -> Scope:
        """Return the nodes of a job that this process is not in. Raise StageError."""
        by_step = os.getuid() != 0  # no step of root's can enter a user's job
        if by_step:
            job.enter(number, dict(environment), srun)
        found = job.look_up(number, environment, srun)
        names = job.unfold(found.nodes)
        here = job.own_name(environment)
        if names == [here] and not by_step:
            return cls(disks={here: ""}, other_job=number)
        context = found if by_step else None
        return cls(nodes=names, context=context, whole_job=True, other_job=number)

    @classmethod
    def of_hosts(cls, names: Sequence[str]) -> Scope:
        """Return these hosts, of which this machine may be one."""
        own = name_here(names)
        return cls(disks={own: ""} if own else {}, nodes=[name for name in names if name != own])

    @classmethod
    def of_simulated(cls, root: Path) -> Scope:
        """Return the simulated nodes of `stage --local` whose disks are folders of ``root``.

        Raise UsageError if there are none.
        """
        folder = absolute(str(root))
        disks = [path for path in Path(folder).glob("node*") if path.is_dir()]
        if not disks:
            raise UsageError(
                f"{folder} has no simulated nodes (folders node1, node2, …); name the folder that "
                "`stagectl stage --local` used"
            )
        disks.sort(key=lambda path: (len(path.name), path.name))
        return cls(disks={path.name: str(path) for path in disks})

    def without_ssh(self, words: Sequence[str], answers: Iterable[Answer]) -> str:
        """Return how to run stagectl without ssh, if a node gave no answer that needs ssh.

        ``words`` are those of the command line, but for the nodes.
        """
        inside = job.unfold(self.context.nodes) if self.context else []
        there = [one for one in answers if one.node in self.nodes and not job.is_away(one.state)]
        if not any(one.problem and one.node not in inside for one in there):
            return ""
        if os.getuid() == 0:  # no step of root's can enter a user's job
            nodes = job.fold([one.node for one in there])
            return (
                "if these nodes cannot be reached by ssh, ask them within a job of root's: "
                f"salloc -w {nodes} --overcommit stagectl {shlex.join(words)}"
            )
        nodes, command = job.fold(self.nodes), f"stagectl {shlex.join(words)}"
        return (
            "if these nodes cannot be reached by ssh, ask them within a job that has these nodes: "
            f"srun --jobid=ID --overlap -N1 -n1 {command} -w {nodes}, or within a new one: "
            f"salloc -w {nodes} {command}"
        )

    def ask(self, command: Command, rules: Policy, environment: Mapping[str, str]) -> list[Answer]:
        """Carry out ``command`` on all nodes and return the answer of each."""
        answers = [Answer(node, answer(command, disk)) for node, disk in self.disks.items()]
        if self.nodes:
            own = job.outside(environment) if self.other_job else environment
            answers += nodes.ask(self.nodes, command, self.context, rules, own)
        return answers


def read_answers(
    answers: Iterable[Answer], kind: type[_Result]
) -> tuple[dict[str, _Result], dict[str, str]]:
    """Return each answer as a ``kind``, and why other nodes have none; both by node."""
    results: dict[str, _Result] = {}
    problems: dict[str, str] = {}
    for one in answers:
        if one.content is None:
            problems[one.node] = one.problem
            continue
        try:
            results[one.node] = codec_of(kind).from_data(one.content)
        except ValueError:
            problems[one.node] = (
                "its slurm-stage has another version than this one; "
                "the administrator must install the same version on all nodes"
            )
    return results, problems


def by_problem(problems: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the nodes of each problem. Pure.

    Where a text names its node, as those of ssh do, it names all that have the same text but for
    that.

    >>> by_problem({"n1": "ssh: no route to n1", "n2": "ssh: no route to n2", "n3": "late"})
    {'ssh: no route to n[1-2]': ['n1', 'n2'], 'late': ['n3']}
    """
    nodes: dict[str, list[str]] = {}
    for node, problem in problems.items():
        itself = rf"(?<![\w.-]){re.escape(node)}(?![\w-])"
        nodes.setdefault(re.sub(itself, "\0", problem), []).append(node)
    return {text.replace("\0", job.fold(names)): names for text, names in nodes.items()}
