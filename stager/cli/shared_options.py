"""Define the options that several commands share.

Options that belong together reach the command as one value: `RunOptions` for commands that start
ranks, `NodeOptions` for commands about what is staged already.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from stager.base.errors import UsageError
from stager.base.paths import LAUNCHERS, SITE_CONFIG
from stager.cli.complete import nodes

if TYPE_CHECKING:
    from stager.launch.nodes import Scope
    from stager.launch.targets import Nodes
    from stager.request.policy import Policy

_Command = Callable[..., int]
_Decorator = Callable[[_Command], _Command]

config_option = click.option(
    "--config", type=click.Path(path_type=Path, readable=False), default=Path(SITE_CONFIG),
    show_default=True, help="The site's configuration file.",
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Where ranks are started: on ``local`` simulated nodes, or if that is 0, on a job's nodes.

    ``job_id`` is that job, None for the one that this process is in. ``hosts``, ``hostfile`` or
    ``launcher`` name other nodes than those of a Slurm job, on which ranks are started when all
    have answered within ``wait`` seconds; None for the site's.
    """

    local: int
    local_root: Path | None
    config: Path
    hosts: str = ""
    hostfile: Path | None = None
    launcher: str | None = None
    wait: float | None = None
    job_id: int | None = None

    def find(self, values: Sequence[str] = ()) -> Nodes:
        """Return the nodes that are meant, to stage ``values`` there. Raise StageError."""
        from stager.launch.targets import find_nodes  # neither the help nor completion needs it

        return find_nodes(
            self.config, local=self.local, local_root=self.local_root, job_id=self.job_id,
            hosts=self.hosts, hostfile=self.hostfile, launcher=self.launcher, wait=self.wait,
            values=values,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Which nodes a command is about: at most one of its fields but ``config`` is set."""

    nodes: str
    job_id: int | None
    local_root: Path | None
    config: Path
    hostfile: Path | None = None
    launcher: str | None = None

    @property
    def is_given(self) -> bool:
        """Whether nodes are named, and not those that the command finds by itself."""
        return any((self.nodes, self.job_id, self.local_root, self.hostfile, self.launcher))

    def scope(self, rules: Policy) -> Scope:
        """Return the nodes that are meant. Raise StageError."""
        from stager.launch.nodes import Scope  # neither the help nor completion needs it

        return Scope.find(
            os.environ, rules.launch.srun, nodes=self.nodes, job_id=self.job_id,
            local_root=self.local_root, hostfile=self.hostfile, launcher=self.launcher,
        )  # fmt: skip

    def rules(self) -> Policy:
        """Return the site's policy for the job that is meant. Raise PolicyRefusal."""
        from stager.request.policy import load_here

        simulated, environment = self.local_root is not None, dict(os.environ)
        rules = load_here(self.config, environment, simulated=simulated)
        of_job = rules.private_roots or rules.absent_roots or rules.shared_fs.driver
        if not (self.job_id and of_job):
            return rules
        from stager.launch import job  # few sites have these

        job.describe(self.job_id, environment, rules.launch.srun)
        return load_here(self.config, environment, simulated=simulated)


def _together(name: str, kind: type, *options: Callable[[_Command], _Command]) -> _Decorator:
    """Return a decorator that adds ``options``, passed on as one ``kind`` named ``name``."""

    def decorate(command: _Command) -> _Command:
        @wraps(command)
        def called(**given: Any) -> int:
            value = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            return command(**{name: value}, **given)

        decorated: _Command = called
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


def _not_empty(context: click.Context, parameter: click.Parameter, value: str) -> str:
    # An unset variable of a script gives an empty list: that must not mean all nodes of the job.
    given = parameter.name and context.get_parameter_source(parameter.name)
    if given is ParameterSource.COMMANDLINE and not value.strip():
        raise UsageError(f"--{parameter.name} is empty: name the nodes, such as n[1-4]")
    return value


_job_option = click.option(
    "--job", "job_id", type=click.IntRange(1), metavar="ID", help="Use the nodes of this job."
)
_launcher_option = click.option(
    "--launcher", type=click.Choice(LAUNCHERS), metavar="NAME",
    help=f"Use the nodes of this job: of {', '.join(LAUNCHERS[:-1])} or {LAUNCHERS[-1]}.  "
    "[default: as the environment says]",
)  # fmt: skip

#: Adds the options of `RunOptions` to a command, which gets them as ``run``.
run_options = _together(
    "run",
    RunOptions,
    click.option(
        "--local", type=click.IntRange(0, 256), metavar="N", default=0,
        help="Simulate N nodes on this machine; each has a folder as its disk.",
    ),
    click.option(
        "--local-root", type=click.Path(path_type=Path),
        help="Folder for the disks of the simulated nodes.  [default: ./stage-nodes]",
    ),
    _job_option,
    click.option(
        "--hosts", metavar="HOSTS", default="", callback=_not_empty,
        help="Without Slurm: use these hosts, such as n[1-4], over ssh.",
    ),
    click.option(
        "--hostfile", type=click.Path(path_type=Path, readable=False), metavar="FILE",
        help="Use the hosts in this file of mpiexec, over ssh.",
    ),
    _launcher_option,
    click.option(
        "--wait", type=click.FloatRange(0, 86_400), metavar="S",
        help="Without Slurm: wait so many seconds until all hosts answer; 0: ask none.",
    ),
    config_option,
)  # fmt: skip


def _options_of_nodes(*, simulated: bool) -> _Decorator:
    return _together(
        "where",
        NodeOptions,
        click.option(
            "-w", "--nodes", metavar="NODES", default="", callback=_not_empty,
            shell_complete=nodes,
            help="Use these nodes, such as n[1-4], or a node group of ClusterShell: @group.",
        ),
        _job_option,
        click.option(
            "--hostfile", type=click.Path(path_type=Path, readable=False), metavar="FILE",
            help="Use the hosts in this file of mpiexec, over ssh.",
        ),
        _launcher_option,
        click.option(
            "--local-root", type=click.Path(path_type=Path), hidden=not simulated,
            help="Use the simulated nodes of `stage --local` in this folder.",
        ),
        config_option,
    )  # fmt: skip


#: Adds the options of `NodeOptions` to a command, which gets them as ``where``.
node_options = _options_of_nodes(simulated=True)
#: The same for a command that refuses simulated nodes.
real_node_options = _options_of_nodes(simulated=False)
