"""``stagectl check``: check batch scripts and directives before they are submitted.

Sources are looked for on this node, before a job looks for them on its own. sbatch runs it at every
submission, so it imports little.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import struct
import time
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, NamedTuple

import click

from stager.base.child import LateAnswerError, answer
from stager.base.errors import PolicyRefusal, SourceError, StageError, UsageError
from stager.base.paths import pattern_hint
from stager.base.text import printable, showable
from stager.cli.arguments import read_script
from stager.cli.command import Command
from stager.cli.complete import directives
from stager.cli.shared_options import config_option
from stager.cli.terminal import complain, say
from stager.launch.credentials import UnseenError, content, read_url_files
from stager.request.grammar import asked_tolerance, parse_value, with_values
from stager.request.items import check_options
from stager.request.names import Names
from stager.request.resolve import build_request, conflicts, plain_path, resolve
from stager.request.script import (
    cut_values,
    head,
    ignored_lines,
    likely_mistakes,
    parse_script,
    refused_by_sbatch,
    sbatch_values,
)
from stager.source.schemes import Scheme

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from stager.request.grammar import Directive
    from stager.request.items import StageItem
    from stager.request.policy import Launch, Policy

#: Seconds for looking at all sources.
_LIMIT = 2.0
#: What is told of one path: the number of an error, 0 for none, and whether it is a folder.
_ANSWER = struct.Struct("!H?")


def contents() -> Callable[[str], str]:
    """Return what reads files as `credentials.content`, but for `_LIMIT` in all; then OSError."""
    deadline = time.monotonic() + _LIMIT

    def read(path: str) -> str:
        try:
            left = deadline - time.monotonic()
            told = answer(lambda output: _tell_content(path, output), left) if left > 0 else b""
        except LateAnswerError:
            told = b""
        if not told:
            raise TimeoutError(errno.ETIMEDOUT, f"no answer for {_LIMIT:g} s")
        text, problem, number = json.loads(told)
        if number:
            raise OSError(number, os.strerror(number))
        if problem:
            raise SourceError(problem)
        return str(text)

    return read


def _tell_content(path: str, output: int) -> None:
    text, problem, number = "", "", 0
    try:
        text = content(path)
    except SourceError as error:
        problem = error.message
    except OSError as error:
        number = error.errno or errno.EIO
    os.write(output, json.dumps((text, problem, number)).encode())


class Seen(NamedTuple):
    """What is at a path: why this user cannot read it here, if so, and whether it is a folder."""

    problem: str
    is_folder: bool = False


def missing(sources: Iterable[str]) -> list[str]:
    """Return the paths that are not in a folder which this node sees; none if it does not answer.

    A name with a ``*`` is looked for in the folder above it.
    """
    paths = (source.rstrip("/") for source in sources if not Scheme.of(source).is_url)
    folders = {path: os.path.dirname(re.split("[*?]", path)[0]) for path in paths}
    seen = look([*folders, *folders.values()])
    absent, unknown = Seen(os.strerror(errno.ENOENT)), Seen("")
    return [
        path
        for path, folder in folders.items()
        if seen.get(path) == absent and seen.get(folder, unknown).is_folder
    ]


def look(sources: Iterable[str]) -> dict[str, Seen]:
    """Look at paths on this node for `_LIMIT` seconds, as this user. URLs are left out.

    If a filesystem gives no answer, the paths after the first one there are left out, too.
    """
    paths = [source for source in dict.fromkeys(sources) if not Scheme.of(source).is_url]

    def tell(output: int) -> None:
        for path in paths:
            os.write(output, _ANSWER.pack(*_look_at(path)))

    try:
        answers = answer(tell, _LIMIT) if paths else b""
    except LateAnswerError as error:
        answers = error.so_far
    whole = len(answers) // _ANSWER.size
    told = _ANSWER.iter_unpack(answers[: whole * _ANSWER.size])
    found = {
        path: Seen(os.strerror(number) if number else "", is_folder)
        for path, (number, is_folder) in zip(paths, told, strict=False)
    }
    if whole < len(paths):
        found[paths[whole]] = Seen(f"no answer for {_LIMIT:g} s")
    return found


def _look_at(path: str) -> tuple[int, bool]:
    """Return the number of the error with which a path cannot be read, and if it is a folder."""
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        return error.errno or 0, False
    except ValueError:  # a null byte
        return errno.EINVAL, False
    return 0 if os.access(path, os.R_OK) else errno.EACCES, is_folder


@click.command(cls=Command, topics=("directives",))
@click.argument("values", metavar="[SRC:DST[,key=value]]...", shell_complete=directives, nargs=-1)
@click.option(
    "--script",
    "scripts",
    type=click.Path(path_type=Path, readable=False),
    multiple=True,
    help="Check the #STAGE and #SBATCH --stage lines of this batch script; - is stdin.",
)
@config_option
@click.option("--quiet", is_flag=True, help="Print only what is wrong.")
@click.option(
    "--stage-tolerate", "tolerate", metavar="N|N%", default="", help="Check this option, too."
)
@click.option("--submits", is_flag=True, hidden=True, help="Warn of what is surely missing.")
@click.option("--fill", is_flag=True, hidden=True, help="Print the values with what is known here.")
@click.option("--step", is_flag=True, hidden=True, help="Check for an srun in this job.")
def check(
    values: tuple[str, ...],
    scripts: tuple[Path, ...],
    config: Path,
    quiet: bool,
    tolerate: str,
    submits: bool,
    fill: bool,
    step: bool,
) -> int:
    """Check batch scripts and SRC:DST values before you submit them.

    Checks how they are written, and whether the site's configuration allows the destinations.
    A script that is empty, binary, without '#!' or has the line ends of Windows is an error.
    sbatch's other options are not checked.
    Warnings name lines of a script that are ignored or cut and, without --quiet, each source that
    this machine does not see. They do not change the exit code.
    """
    if not values and not scripts and not tolerate:
        raise click.UsageError("Name what to check: SRC:DST, or a batch script by --script FILE.")
    from stager.request import policy  # neither the help nor completion needs pydantic

    texts = [(script, read_script(str(script))) for script in scripts]
    rules = policy.load_if_present(config)
    variables = None if rules is None else rules.variables
    names = Names.at_submission(os.environ, variables, is_step=step)
    found = _Findings(tolerate, names)
    found.read_arguments(values, looks=not quiet)
    for script, lines in texts:
        _warn_of_lines(script, lines)
        found.read_script(script, lines)
    rules = rules and rules.at(names.letters)
    found.read_tolerances((rules or policy.ANY).launch)
    items = found.resolve(rules or policy.ANY, submits=submits)
    known = [item for item in items if item.source and names.is_filled(item.source)]
    for name in names.unset():
        complain(f"warning: {name} is not set here; the job fails unless its environment has it")
    if found.faults:
        code = found.complain()
        if not quiet:
            _warn_of_sources(known)
        return code
    request = build_request(items, rules or policy.ANY)
    request.to_json()  # raises if it is too long
    _warn_of_missing(known if submits else ())
    if fill:
        click.echo(os.fsencode(";".join(with_values(value, names) for value in values)), nl=False)
    if not quiet:
        _tell_what_is_right(items, of_scripts=bool(scripts))
        if rules is None:
            say(f"only the syntax was checked: there is no {config} here")
        _warn_of_sources(known)
    return 0


def _tell_what_is_right(items: Sequence[StageItem], *, of_scripts: bool) -> None:
    for item in items:
        given = f"{item.source} to {item.destination} ({item.options})"
        say(f"ok: {given if item.source else f'an empty folder {item.destination}'}")
    if not items:
        none = "no #STAGE or #SBATCH --stage line before the first command"
        say(f"ok: {none}" if of_scripts else "ok")


class _Findings:
    """What is asked for, and what is wrong with it, each with its place: ``FILE:LINE: ``.

    The place of what is on the command line is empty.
    """

    def __init__(self, tolerate: str, names: Names) -> None:
        self._names = names
        #: The values of --stage.
        self.values: list[str] = []
        self.faults: list[tuple[str, StageError]] = []
        self._directives: list[tuple[str, Directive]] = []
        #: The values of --stage-tolerate.
        self._tolerances = [("", tolerate)]
        #: All places, in order.
        self._places = [""]

    def read_arguments(self, values: Sequence[str], *, looks: bool) -> None:
        """Add the directives of all arguments. Raise UsageError if they are one in two words."""
        if len(values) == 2 and not any(":" in value for value in values):
            joined = showable(printable(quote(":".join(values))))
            raise UsageError(f"write source and destination as one argument: {joined}")
        for value in values:
            self._read_argument(value, looks=looks)

    def _read_argument(self, value: str, *, looks: bool) -> None:
        """Add the directives of an argument. If it ``looks``, it knows the path of a file."""
        if looks and not {":", "\0"} & {*value} and os.path.isfile(value):
            problem = (
                f"{printable(value)} is a file; to check a batch script, write --script "
                f"{printable(quote(value))}; to check a directive, SRC:DST"
            )
            self.faults.append(("", UsageError(problem)))
        else:
            self.read_value(value)

    def read_value(self, value: str, place: str = "") -> None:
        """Add the directives of a value of --stage."""
        self.values.append(value)
        try:
            self._directives += [(place, one) for one in parse_value(value, self._names)]
        except UsageError as error:
            self.faults.append((place, error))

    def read_script(self, script: Path, lines: Iterable[str]) -> None:
        """Add the directives in the head of a batch script, and why sbatch refuses it."""
        for number, line in enumerate(head(lines), 1):
            place = f"{script}:{number}: "
            self._places.append(place)
            try:
                self._directives += [(place, one) for one in parse_script([line], self._names)]
                values = sbatch_values([line])
                tolerances = sbatch_values([line], "--stage-tolerate")
            except UsageError as error:
                self.faults.append((place, error))
                continue
            for value in values:
                self.read_value(value, place)
            self._tolerances += [(place, value) for value in tolerances]
        for number, problem in refused_by_sbatch(lines):
            place = f"{script}:{number}: "
            if place not in self._places:
                self._places.append(place)
            self.faults.append((place, UsageError(f"sbatch refuses this script: {problem}")))

    def read_tolerances(self, rules: Launch) -> None:
        """Look at the values of --stage-tolerate."""
        for place, text in self._tolerances:
            try:
                asked_tolerance(text, "--stage-tolerate", rules.tolerate)
            except StageError as error:
                self.faults.append((place, error))

    def resolve(self, rules: Policy, *, submits: bool) -> tuple[StageItem, ...]:
        """Return the items that the directives ask for; add those that are refused to `faults`.

        A job that is submitted may see the file of a URL where this machine does not.
        """
        read_content = contents()
        items: dict[StageItem, str] = {}
        secrets: dict[str, str] = {}
        for place, directive in self._directives:
            if Scheme.of(directive.source).is_url and not self._names.is_filled(directive.source):
                continue  # the job will check it
            try:
                read = read_url_files([directive], secrets, read_content)
                items |= {one: items.get(one, place) for one in resolve(read, rules)}
            except StageError as error:
                if submits and isinstance(error, UnseenError):
                    complain(f"{place}warning: {error.message}")
                    continue
                if isinstance(error, PolicyRefusal) and not place:
                    hint = self._hint(plain_path(directive.destination), rules)
                    self.faults.append((place, PolicyRefusal(f"{error.message}{hint}")))
                    continue
                self.faults.append((place, error))
        self.faults += [(items[item], UsageError(why)) for item, why in conflicts(tuple(items))]
        return tuple(items)

    def _hint(self, destination: str, rules: Policy) -> str:
        """Return what a shell may have done to a destination outside of the site's folders."""
        folders = (*rules.allowed, *rules.shared_roots)
        is_inside = any(f"{destination}/".startswith(f"{folder}/") for folder in folders)
        return "" if is_inside else self._names.hint(destination)

    def complain(self) -> int:
        """Print all faults in the order of their places; return the code of the first one found."""
        order = {place: at for at, place in enumerate(self._places)}
        for place, error in sorted(self.faults, key=lambda fault: order[fault[0]]):
            complain(f"{place}{error.message}")
        return self.faults[0][1].code


def _warn_of_lines(script: Path, lines: list[str]) -> None:
    for number, problem in _doubtful_lines(lines):
        complain(f"{script}:{number}: warning: {problem}")


def _doubtful_lines(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the number, from 1, of each line that does not do what was meant, and why."""
    for number, form, line in likely_mistakes(lines):
        is_option = line.startswith("#SBATCH")
        what = "this option is misspelled" if is_option else "this is only a comment"
        yield number, f"{what}; to stage, write '{form}': {showable(line)}"
    for number, word in cut_values(lines):
        yield (
            number,
            f"a blank ends the value of --stage before '{showable(word)}'; put the value in quotes",
        )
    for number, line in ignored_lines(lines):
        yield number, f"this is after the first command, so it is ignored: {showable(line)}"


def _warn_of_missing(items: Iterable[StageItem]) -> None:
    """Warn of each source that is surely missing on this machine, and wait for no filesystem."""
    for path in missing(item.source for item in items) if os.geteuid() else ():
        hint = pattern_hint(path) or "check the path: it must be there when the job starts"
        complain(f"warning: {path}: not seen from this machine; {hint}")


def _warn_of_sources(items: Iterable[StageItem]) -> None:
    seen = look(item.source for item in items)
    for source, found in seen.items():
        if found.problem:
            mounted = "check the path, and that the compute nodes mount this filesystem"
            remedy = pattern_hint(source) or mounted
            if found.problem == os.strerror(errno.EACCES):
                remedy = "you may not read it; ask its owner"
            complain(f"{source}: not seen from this machine ({found.problem}); {remedy}")
    for item in items:
        here = seen.get(item.source)
        if here and not here.problem:
            try:
                check_options(item, is_folder=here.is_folder)
            except StageError as error:
                complain(f"on this machine {error.message}")
