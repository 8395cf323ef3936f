"""``stagectl gate``: what Slurm calls before a job's own program starts.

The plugin or TaskProlog runs it on the job's first node; all tasks of the job wait for its end.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import click

from stager.base.errors import NO_PLUGIN, DirectiveErrors, LaunchError, StageError
from stager.base.log import log, result_line
from stager.base.outcome import Outcome
from stager.cli.arguments import read_head
from stager.cli.progress import Progress
from stager.cli.render import print_outcome, summary
from stager.cli.shared_options import config_option
from stager.cli.terminal import complain, ignore, printable_lines, say
from stager.launch import job
from stager.launch.credentials import read_url_files
from stager.launch.job import write_comment
from stager.launch.targets import JobNodes, end_step, own_user
from stager.launch.tolerate import give_back, variables_without
from stager.node.job_state import exports
from stager.request.grammar import parse_value
from stager.request.items import Waiting
from stager.request.names import Names
from stager.request.resolve import build_request, resolve
from stager.request.script import may_stage, parse_script

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import TextIO

    from stager.request.policy import Policy

#: The variable in which the plugin passes the directives of the job's ``--stage`` options.
_DIRECTIVES = "STAGE_DIRECTIVES"


@click.command(hidden=True)
@config_option
@click.option(
    "--script", type=click.Path(readable=False), help="The batch script, - for stdin, or nothing."
)
@click.option("--status-file", default="", help="Name of the file for the job's waiting tasks.")
@click.option("--step", default="", help="Number of the step that waits.")
@click.option("--task-prolog", is_flag=True, help="Print in the form that TaskProlog must have.")
@click.option("--quiet", is_flag=True, help="Print failures alone.")
@click.option("--tolerate", metavar="N|N%", default="", help="How many nodes may fail.")
def gate(
    config: Path,
    script: str | None,
    status_file: str,
    step: str,
    task_prolog: bool,
    quiet: bool,
    tolerate: str,
) -> int:
    """Stage what a job's --stage option and script ask for; its tasks wait for the exit code."""
    done: Callable[[str], None] = _print_line if task_prolog else partial(say, err=True)
    failed = _print_line if task_prolog else complain
    if quiet:
        done = ignore
    screen = None if task_prolog or quiet else sys.stderr
    return _Gate(
        config, script, status_file, step, task_prolog, tolerate, done, failed, screen
    ).run()


@dataclass(frozen=True, slots=True)
class _Gate:
    """One call of the gate, and how it prints."""

    config: Path
    script: str | None
    status_file: str
    step: str
    task_prolog: bool
    tolerate: str
    say: Callable[[str], None]
    complain: Callable[[str], None]
    #: Where bars are drawn if it is a terminal.
    screen: TextIO | None

    def run(self) -> int:
        """Stage, print the outcome, tell it outside of the job too, and return the exit code."""
        begun = time.monotonic()
        try:
            outcome, rules = self._stage()
        except StageError as error:
            for fault in error.faults if isinstance(error, DirectiveErrors) else [error]:
                self.complain(str(fault))
            self._end(error.code, is_told=False)
            self._tell_failure(error, time.monotonic() - begun)
            return error.code
        print_outcome(outcome, self.say, self.complain)
        is_begun = any(one.message == NO_PLUGIN for one in outcome.failures)
        self._end(outcome.code, is_begun=is_begun and self._has_many_tasks())
        if rules and not outcome.failed_nodes:
            _comment_on(outcome, rules)
        return outcome.code

    def _end(self, code: int, *, is_told: bool = True, is_begun: bool = False) -> None:
        """Say that the program does not start if ``code`` is not 0, and end the waits of others.

        ``is_told`` means that the ranks have told each node of a failure that they found, and
        ``is_begun`` that tasks may have started on nodes without the plugin.
        """
        if code:
            where = " where slurm-stage runs" if is_begun else ""
            self.complain(f"the job's own program was not started{where} (exit code {code})")
        is_unsaid = code == LaunchError.code or (code and not is_told)
        if is_unsaid and self._has_many_tasks():
            # No rank may have ended the wait of the tasks on other nodes, so Slurm ends them.
            end_step(self.config, self.step)

    def _has_many_tasks(self) -> bool:
        """Return whether this is a step of an srun, and not the batch script's."""
        return bool(self.step) and int(self.step) < job.SPECIAL_STEPS

    def _stage(self) -> tuple[Outcome, Policy | None]:
        """Return the outcome, and the site's rules if anything was to be staged."""
        text = os.environ.get(_DIRECTIVES, "")
        lines = read_head(self.script) if self.script else []
        # The plugin and TaskProlog only guess which scripts have any directives.
        if not text and not may_stage(lines):
            return Outcome([], [], 0.0), None
        nodes = JobNodes.find(self.config, of_step=self._has_many_tasks())
        names = Names.of(os.environ, nodes.rules.variables)
        directives = [*parse_value(text, names)] if text else []
        directives += parse_script(lines, names)
        items = resolve(read_url_files(directives, os.environ), nodes.rules)
        waiting = Waiting(self.status_file, self.step, True) if self.status_file else None
        request = build_request(items, nodes.rules, waiting=waiting)
        # A script has not begun, and gets other variables; the srun of a step has its own.
        tolerance = None if self._has_many_tasks() else nodes.tolerated(self.tolerate)
        if (
            tolerance and request.shared_mount
        ):  # a node that leaves takes its part of the data along
            tolerance = replace(tolerance, most=0, asked="the job's filesystem is on all its nodes")
        with Progress(self.say, bars=self.screen) as progress:
            outcome = nodes.run(request, progress.show, tolerance)
        if outcome.failed_nodes:
            outcome = self._give_back(nodes, outcome)
        if not outcome.failures:
            _export(request.variables)
        return outcome, nodes.rules

    def _give_back(self, nodes: JobNodes, outcome: Outcome) -> Outcome:
        """Let the nodes that failed leave the job, and tell its script; if Slurm refuses, fail."""
        _comment_on(outcome, nodes.rules)  # without slurmdbd, Slurm takes none afterwards
        gone = [one.node for one in outcome.failed_nodes]
        outcome = give_back(nodes.context, outcome, nodes.rules.launch.srun)
        if outcome.failures:
            return outcome
        variables = variables_without(os.environ, job.unfold(nodes.context.nodes), gone)
        _export(variables)
        return outcome

    def _tell_failure(self, error: StageError, seconds: float) -> None:
        """Tell, where no rank could log it, that and why the stage failed."""
        problem = str(error).splitlines()[0]  # the lines below it quote a request, or say more
        from stager.request import policy  # stage.toml may not have been read so far

        with suppress(StageError):  # it may be at fault itself
            rules = policy.load(self.config)
            number = job.number(os.environ)
            if rules.report.syslog:
                log(result_line(number, own_user(os.environ), 0, seconds, error.code, problem))
            _comment(rules, error.code, problem)


def _comment_on(outcome: Outcome, rules: Policy) -> None:
    if results := summary(replace(outcome, evicted=[])):
        more = 0 if outcome.failed_nodes else len(outcome.items) - 1
        _comment(rules, outcome.code, results[0], more, partly=bool(outcome.failed_nodes))


def _comment(rules: Policy, code: int, text: str, more: int = 0, *, partly: bool = False) -> None:
    """Write the result into the job's comment, if the site wants that.

    ``partly`` means that some nodes were left out, which is told like a failure. A job that was
    requeued may have the failure of its earlier run there.
    """
    wanted = rules.report.job_comment
    is_requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    if wanted == "all" or (wanted == "failed" and (code or partly or is_requeued)):
        result = f"failed with code {code}: {text}" if code else text
        others = f" (and {more} more)" if more > 0 else ""
        write_comment(f"{result}{others}", os.environ, rules.launch.srun)


def _export(variables: Mapping[str, str]) -> None:
    """Have Slurm or the plugin, which reads stdout, set variables of the first task."""
    click.echo(os.fsencode(exports(variables)), nl=False)


def _print_line(text: str) -> None:
    """Print a text in the language of TaskProlog, whose output Slurm reads line by line."""
    for line in f"stage: {printable_lines(text)}".splitlines():
        click.echo(f"print {line}")
