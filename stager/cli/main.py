"""Run ``stagectl``: find the command, call it, and end with its exit code.

Every failure becomes one message and an exit code here, and nowhere else.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import click

from stager.base.errors import LaunchError, StageError
from stager.base.text import SHOW_BYTES
from stager.cli.command import with_short_help
from stager.cli.terminal import complain
from stager.source.endpoints import URL_SECRETS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from click.shell_completion import CompletionItem

#: The variable by which a shell asks what is to be completed, as click names it.
_SHELL_ASKS = "_STAGECTL_COMPLETE"

#: Objects between two searches for garbage. What is imported has fewer, and leaves none: to search
#: it as often as usual takes a tenth of a command's start.
_OBJECTS = 1_000_000

#: Each command's module in stager.cli, and its line in ``stagectl --help``; empty if Slurm or
#: another stagectl calls it. A module is imported when its command is called: sbatch runs `check`
#: at every submission, and a job starts when `gate` has ended.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "bench": ("bench", "Measure the network, the disks and the source of this job's nodes."),
    "check": ("check", "Check batch scripts and SRC:DST values before you submit them."),
    "demo": ("stage", "Stage 256 MiB to simulated nodes on this machine, twice."),
    "doctor": ("doctor", "Check that this site is set up for safe staging."),
    "evict": ("copies", "Delete your copies from the disks of the nodes."),
    "gate": ("gate", ""),
    "help": ("help", "Explain a command, or a topic."),
    "importer": ("importer", ""),
    "node": ("prepare", ""),
    "pack": ("pack", "Pack a folder of many files into one archive."),
    "pin": ("copies", "Protect your copies at DST from eviction."),
    "plan": ("stage", "Show what `stage` would do, without doing it."),
    "prepare": ("prepare", "Make ready nodes on which root's part does not run."),
    "site": ("site", "Show where and what you may stage at this site."),
    "stage": ("stage", "Copy files to every node of this job."),
    "status": ("status", "Show what is staged for you, and how much space is free."),
    "unpin": ("copies", "Allow your copies at DST to be evicted again."),
    "verify": ("copies", "Read your copies again and compare them with their checksums."),
}


class _Commands(click.Group):
    """The commands of `COMMANDS`."""

    def get_params(self, context: click.Context) -> list[click.Parameter]:
        return with_short_help(super().get_params(context))

    def __init__(self, **settings: Any) -> None:
        # click looks here for a command that resembles a mistyped one.
        known = {name: click.Command(name) for name, (_, line) in COMMANDS.items() if line}
        super().__init__(commands=known, **settings)

    def list_commands(self, _: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = getattr(import_module(f"stager.cli.{COMMANDS[name][0]}"), name)
        assert isinstance(command, click.Command)
        return command

    def shell_complete(self, context: click.Context, start: str) -> list[CompletionItem[Any]]:
        from click.shell_completion import CompletionItem  # only a shell needs it

        # click would import all commands.
        found = [
            CompletionItem(name, help=line)
            for name, (_, line) in COMMANDS.items()
            if line and name.startswith(start)
        ]
        return [*found, *click.Command.shell_complete(self, context, start)]

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items() if line])


def _exit_by_signal(process: int, number: int, _: object) -> None:
    # In a child between fork and exec, Python would print a traceback of the exception.
    if os.getpid() != process:
        os._exit(128 + number)
    sys.exit(128 + number)


def main() -> NoReturn:
    """Run ``stagectl``; every failure ends as one message on stderr and its exit code."""
    gc.set_threshold(_OBJECTS)
    # A reader that leaves the pipe (`stagectl status | head`) is no failure to report.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # Slurm's signals end the launcher too, and with it the ranks.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, partial(_exit_by_signal, os.getpid()))
    _open_streams()
    # None is wanted, and to look for some pydantic would read the metadata of all packages.
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
    os.environ.pop(URL_SECRETS, None)  # it is made here, for the ranks alone
    # In a job's environment it must not keep a command from being run: shells give no arguments.
    asked = os.environ.pop(_SHELL_ASKS, "")
    if asked and len(sys.argv) == 1:
        from stager.cli.complete import answer_shell  # only a shell needs it

        sys.exit(answer_shell(cli, _SHELL_ASKS, asked))
    try:
        code = cli.main(prog_name="stagectl", standalone_mode=False)
        sys.stdout.flush()
    except StageError as error:
        complain(str(error))
        code = error.code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 128 + signal.SIGINT
    except OSError as error:
        if error.filename is None:
            complain(f"the output cannot be written: {error.strerror}")
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still buffered
        else:
            complain(f"{os.fsdecode(error.filename)}: {error.strerror}")
        code = LaunchError.code
    gc.freeze()  # else the interpreter's end would search all that was imported
    sys.exit(code or 0)


def _open_streams() -> None:
    """Make stdout and stderr take any text, even if the caller closed them; stdin is then empty."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - open until the end
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - open until the end
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # Paths may hold any bytes, and a message about them must still be printed.
        stream.reconfigure(errors=SHOW_BYTES, line_buffering=True)  # type: ignore[union-attr]


@click.group(cls=_Commands, context_settings={"help_option_names": ["--help"]})
@click.version_option(package_name="slurm-stage", message="%(version)s")
def cli() -> None:
    """Copy files to the local disks of every node of a Slurm job.

    A job asks for it by `sbatch --stage=SRC:DST` or by lines `#STAGE SRC:DST` in its script; then
    the files are there when the script starts. These commands check such requests, stage by hand,
    and show and manage what is staged.

    `stagectl help TOPIC` explains directives, codes, nodes, environment and stage.toml, and each
    command, option, code and key by its name.
    """
