"""``stagectl gate``: what Slurm calls before a job's own program starts.

The plugin or TaskProlog runs it on the job's first node; all tasks of the job wait for its end.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import click

from stager.base.errors import LaunchError, StageError
from stager.base.outcome import Outcome
from stager.cli.console import complain, printable_lines, say
from stager.cli.options import config_option
from stager.cli.progress import Progress
from stager.cli.script import read_head
from stager.cli.staging import JobNodes, build_request, end_step, parse_values, print_outcome
from stager.launch import job
from stager.request.resolve import resolve
from stager.request.script import parse_script

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: The variable in which the plugin passes the directives of the job's ``--stage`` options.
_DIRECTIVES = "STAGE_DIRECTIVES"
#: The variable that names a job's lists of what each node holds; the plugin sets it (gate.c).
_SHARDS = "STAGE_SHARDS"


@click.command(hidden=True)
@config_option
@click.option("--script", type=click.Path(readable=False), help="The batch script, or - for stdin.")
@click.option("--status-file", default="", help="Name of the file for the job's waiting tasks.")
@click.option("--step", default="", help="Number of the step that waits.")
@click.option("--task-prolog", is_flag=True, help="Print in the form that TaskProlog must have.")
def gate(config: Path, script: str | None, status_file: str, step: str, task_prolog: bool) -> int:
    """Stage what a job's --stage option and script ask for; its tasks wait for the exit code."""
    output = (_print_line, _print_line) if task_prolog else (partial(say, err=True), complain)
    return _Gate(config, script, status_file, step, task_prolog, *output).run()


@dataclass(frozen=True, slots=True)
class _Gate:
    """One call of the gate, and how it prints."""

    config: Path
    script: str | None
    status_file: str
    step: str
    task_prolog: bool
    say: Callable[[str], None]
    complain: Callable[[str], None]

    def run(self) -> int:
        """Stage, print the outcome and return the exit code."""
        try:
            outcome = self._stage()
        except StageError as error:
            self.complain(str(error))
            code = error.code
        else:
            print_outcome(outcome, self.say, self.complain)
            code = outcome.code
            # The end of a line would begin another order to Slurm.
            lists = [path for path in outcome.shard_lists if "\n" not in path]
            if self.task_prolog and lists:
                click.echo(f"export {_SHARDS}={':'.join(lists)}")
        if code:
            self.complain(f"the job's own program was not started (exit code {code})")
        if code == LaunchError.code and self.step and int(self.step) < job.SPECIAL_STEPS:
            # No rank may have ended the wait of the tasks on other nodes, so Slurm ends them.
            end_step(self.config, self.step)
        return code

    def _stage(self) -> Outcome:
        text = os.environ.get(_DIRECTIVES, "")
        directives = parse_values([text] if text else [])
        directives += parse_script(read_head(self.script)) if self.script else []
        if not directives:  # the plugin and TaskProlog only guess which scripts have any
            return Outcome([], [], 0.0)
        nodes = JobNodes.find(self.config)
        request = replace(
            build_request(resolve(directives, nodes.rules), nodes.rules),
            status_file=self.status_file, step=self.step, directives=text,
        )  # fmt: skip
        with Progress(self.say, bars=None if self.task_prolog else sys.stderr) as progress:
            return nodes.run(request, progress.show)


def _print_line(text: str) -> None:
    """Print a text in the language of TaskProlog, whose output Slurm reads line by line."""
    for line in f"stage: {printable_lines(text)}".splitlines():
        click.echo(f"print {line}")
