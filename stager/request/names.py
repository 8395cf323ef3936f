"""Fill in what ``%j``, ``$SLURM_TMPDIR`` and ``~/`` stand for, in directives and stage.toml.

Nothing that is filled in adds a ``..`` to a path. Pure, but for `Names.of` and
`Names.at_submission`, which ask for the user and the current folder.
"""

from __future__ import annotations

import difflib
import os
import pwd
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from stager.base.errors import UsageError
from stager.base.text import printable
from stager.source.schemes import Scheme

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stager.base.errors import DirectiveError
    from stager.request.lexer import Piece

#: What each letter behind a ``%`` stands for, as in the names of sbatch's files, and two more.
LETTERS = {
    "u": "the user's name",
    "U": "the user's uid",
    "j": "the job's number",
    "A": "the number of the job's array, or of the job",
    "a": "the array task's number",
    "x": "the job's name",
    "r": "how often the job was restarted",
}
#: Variables that are other spellings of letters.
SPELLINGS = {
    "USER": "u",
    "SLURM_JOB_ID": "j",
    "SLURM_ARRAY_JOB_ID": "A",
    "SLURM_ARRAY_TASK_ID": "a",
    "SLURM_JOB_NAME": "x",
    "SLURM_RESTART_COUNT": "r",
}
#: Those of sbatch that are not the same on all nodes, for all tasks, or in one form.
_OTHERS = "NntsJb"
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", re.ASCII)
#: The last are what a shell fills in, and nobody else.
_NAME = re.compile(
    rf"{_VARIABLE.pattern}|%([{''.join(LETTERS)}{_OTHERS}%])|(\$[0-9@*({{])", re.ASCII
)
#: What does not reach the helper, as it would run by it: may_be_named in gate.c.
_NOT_PASSED_ON = re.compile(r"(?:LD_|PYTHON|OMPI_|PMIX_|SLURM_SPANK_|STAGE_)\w*|PATH")
_CONTROL = re.compile(r"[\0-\x1f\x7f]")
_IN_SCRIPT = "for a variable that only the script knows, run stagectl stage in the script"


class _NotYetSet(dict[str, str]):
    """Variables at a job's submission: others may be set in the job, and stand for themselves."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(environment)
        #: Those that were asked for, in order.
        self.asked: dict[str, None] = {}

    def __missing__(self, name: str) -> str:
        self.asked[name] = None
        return f"${name}"


@dataclass(frozen=True, slots=True)
class Names:
    """What is filled in for names."""

    #: What the `LETTERS` stand for, as far as it is known.
    letters: Mapping[str, str]
    #: The site's variables for DST; their values may have letters. None where stage.toml is not:
    #: any name may be one.
    variables: Mapping[str, str] | None
    #: The variables for SRC.
    environment: Mapping[str, str]
    #: Where a relative SRC begins; empty if it was removed.
    folder: str
    home: str

    @classmethod
    def of(cls, environment: Mapping[str, str], variables: Mapping[str, str]) -> Self:
        """Return the names of the job in this environment, or outside of a job."""
        job = environment.get("SLURM_JOB_ID", "")
        folder = (job and environment.get("SLURM_SUBMIT_DIR")) or current_folder()
        return cls(letters_of(environment), variables, environment, folder, _home(environment))

    @classmethod
    def at_submission(
        cls,
        environment: Mapping[str, str],
        variables: Mapping[str, str] | None,
        *,
        is_step: bool = False,
    ) -> Self:
        """Return the names of a job that is submitted: what is not known yet stands for itself.

        Of a step of the job in this ``environment``, that is its own name (``%x``).
        """
        letters, home = letters_at_submission(environment), _home(environment)
        if is_step:
            letters |= letters_of(environment) | {"x": letters["x"]}
        return cls(letters, variables, _NotYetSet(environment), current_folder(), home)

    def unset(self) -> list[str]:
        """Return the variables in the sources so far that only the job may have."""
        return [*self.environment.asked] if isinstance(self.environment, _NotYetSet) else []

    def is_filled(self, source: str) -> bool:
        """Return whether nothing in a source stands for itself, as at a job's submission."""
        if not isinstance(self.environment, _NotYetSet):
            return True
        later = (value for value in self.letters.values() if value.startswith("%"))
        named = (found[1] or found[2] for found in _VARIABLE.finditer(source))
        return not any(letter in source for letter in later) and all(
            name in self.environment for name in named
        )

    def hint(self, destination: str) -> str:
        """Return what to do if a shell may have replaced a variable of ``destination``."""
        if not self.variables:
            return ""
        quotes = "put the value in single quotes"
        for name in self.variables:
            value = self.environment.get(name, "")
            if value and f"{destination}/".startswith(f"{value.rstrip('/')}/"):
                return f"; {value} is what ${name} is here: {quotes} if you wrote this variable"
        return f"; if you wrote a variable, {quotes}"

    def source(self, piece: Piece) -> str:
        """Return the path or URL that the SRC ``piece`` stands for. Raise DirectiveError."""
        mark = "@" if piece.seen.startswith("@") else ""
        path = piece.behind(len(mark))
        begin = ""
        if path.seen.startswith("~"):
            if path.seen[1:2] not in ("", "/"):
                problem = "only ~/ is known, your own home; write the whole path"
                raise path.fault(f"{problem}, or ./~ for a name that begins with ~")
            begin, path = self._home_of(path), path.behind(1)
        filled = begin + _Filling(path, self, is_source=True).text()
        if not filled.startswith("/") and not Scheme.of(filled).is_url:
            if not self.folder:
                raise piece.fault("the current folder was removed; write the whole path")
            filled = f"{self.folder.rstrip('/')}/{filled}"
        return mark + filled

    def set_variables(self, piece: Piece) -> Iterator[tuple[re.Match[str], str]]:
        """Yield the variables in the SRC ``piece`` that are set in the environment, with values.

        Not Slurm's own, which are the job's, nor what would make a relative path something else.
        """
        begin = piece.seen.startswith("@")
        for match in _VARIABLE.finditer(piece.seen):
            name = match[1] or match[2]
            value = self.environment.get(name, "")
            is_path = match.start() > begin or value.startswith("/") or Scheme.of(value).is_url
            if value and is_path and name != "USER" and not name.startswith("SLURM"):
                yield match, value

    def destination(self, piece: Piece) -> str:
        """Return the path that the DST ``piece`` stands for. Raise DirectiveError."""
        return _Filling(piece, self, is_source=False).text()

    def _home_of(self, piece: Piece) -> str:
        if not self.home.startswith("/"):
            raise piece.fault("your home folder is not known here; write the whole path")
        return self.home.rstrip("/")


def current_folder() -> str:
    """Return the current folder, empty if it was removed."""
    with suppress(OSError):
        return os.getcwd()
    return ""


def absolute(path: str) -> str:
    """Return the absolute form of ``path``. Raise UsageError if the current folder was deleted."""
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        raise UsageError(
            "the current folder does not exist any more; change to another one"
        ) from None


def letters_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what the `LETTERS` stand for in a job; outside of one, the user alone is known.

    Root may ask for a job of another user's.
    """
    letters = _user(environment)
    job = environment.get("SLURM_JOB_ID", "")
    if job:
        of_job = {name: environment.get(name, "") for name in SPELLINGS if name != "USER"}
        of_job["SLURM_ARRAY_JOB_ID"] = of_job["SLURM_ARRAY_JOB_ID"] or job
        of_job["SLURM_RESTART_COUNT"] = of_job["SLURM_RESTART_COUNT"] or "0"
        letters |= {SPELLINGS[name]: value for name, value in of_job.items() if value}
    return letters


def letters_at_submission(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the same of a job that has no number yet: what is not known stands for itself."""
    return {letter: f"%{letter}" for letter in LETTERS} | _user(environment)


def fill_letters(pattern: str, letters: Mapping[str, str]) -> str:
    """Return a path of stage.toml, whose ``%j`` and the like are filled in.

    >>> fill_letters("/scratch/%u.%j/100%%", {"u": "alice", "j": "17"})
    '/scratch/alice.17/100%'

    Raise ValueError for a letter that is none of `LETTERS`, that ``letters`` lacks, or whose value
    cannot be part of a path.
    """

    def fill(found: re.Match[str]) -> str:
        letter = found[1]
        if letter == "%":
            return "%"
        if letter not in LETTERS:
            raise ValueError(f"{found[0]!r} is not known; known: %{' %'.join(LETTERS)} %%")
        if problem := _problem(letter, letters, found[0]):
            raise ValueError(problem)
        return letters[letter]

    filled = re.sub("%(.?)", fill, pattern, flags=re.DOTALL)
    if ".." in filled.split("/"):
        raise ValueError(f"{pattern} would be {printable(filled)}")
    return filled


def _user(environment: Mapping[str, str]) -> dict[str, str]:
    owner = environment.get("SLURM_JOB_UID", "")
    uid = os.getuid() or (int(owner) if owner.isdecimal() else 0)
    try:
        name = pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        name = environment.get("SLURM_JOB_USER", "")  # which Slurm has looked up
    return {"U": str(uid)} | ({"u": name} if name else {})


def _home(environment: Mapping[str, str]) -> str:
    try:
        return environment.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def _problem(letter: str, letters: Mapping[str, str], shown: str) -> str:
    """Return why a letter cannot be filled in, empty if it can."""
    value = letters.get(letter)
    if value is None:
        where = "outside of a job array" if letter == "a" else "here"
        if letter not in "uU" and "j" not in letters:
            where = "outside of a job"
        return f"{shown} is not known {where}"
    if value in ("", ".", "..") or "/" in value or _CONTROL.search(value):
        return f"{shown} is {LETTERS[letter]}, '{printable(value)}', which cannot be in a path"
    return ""


class _Filling:
    """How the names of one path are filled in."""

    def __init__(self, piece: Piece, names: Names, *, is_source: bool) -> None:
        self._piece = piece
        self._names = names
        self._is_source = is_source

    def text(self) -> str:
        """Return the path with all names filled in. Raise DirectiveError."""
        found = list(_NAME.finditer(self._piece.seen))
        if self._is_source and self._is_url(found):  # where codes begin with a '%'
            found = [match for match in found if match[0].startswith("$")]
        parts = list(self._parts(found))
        filled = "".join(part for part, _ in parts)
        origins = [at for part, at in parts for _ in part]
        begin = 0
        for name in filled.split("/"):
            # The '/' on either side makes it a '..' just as well.
            at = max(origins[max(begin - 1, 0) : begin + len(name) + 1], default=-1)
            if name == ".." and at >= 0:
                raise self._piece.fault("this brings a '..' into the path; write it whole", at)
            begin += len(name) + 1
        return filled

    def _is_url(self, found: list[re.Match[str]]) -> bool:
        """Return whether this is a URL, which may begin with a variable."""
        start = self._piece.value
        if found and found[0].start() == 0 and start.startswith("$"):
            start = self._value(found[0]) + start[found[0].end() :]
        return Scheme.of(start).is_url

    def _parts(self, found: list[re.Match[str]]) -> Iterator[tuple[str, int]]:
        """Yield the parts of the path, and where each was filled in; -1 if it was not."""
        end = 0
        for match in found:
            yield self._piece.value[end : match.start()], -1
            yield self._value(match), match.start()
            end = match.end()
        yield self._piece.value[end:], -1

    def _value(self, match: re.Match[str]) -> str:
        """Return what a name stands for. Raise DirectiveError."""
        name, letter = match[1] or match[2], match[3]
        if name:
            letter = SPELLINGS.get(name, "")
            return self._of_letter(match, letter) if letter else self._of_variable(match, name)
        if letter == "%":
            return "%"
        if match[4]:
            problem = f"only a shell fills in '{match[0]}': give --stage on sbatch's command line"
            remedy = f"in double quotes, or write \\{match[0]} for these characters"
            raise self._fault(match, f"{problem}, {remedy}")
        following = self._piece.seen[match.end() : match.end() + 1]
        if letter in "Aa" and re.match("[0-9A-Fa-f]", following):
            long = next(name for name, short in SPELLINGS.items() if short == letter)
            problem = f"'{match[0]}{following}' may be meant as a code"
            remedy = f"write \\% for a percent sign, or ${{{long}}} for {LETTERS[letter]}"
            raise self._fault(match, f"{problem}; {remedy}")
        if letter in _OTHERS:
            problem = f"{match[0]} is not filled in, as the path is one for all nodes and tasks"
            remedy = f"known: %{' %'.join(LETTERS)}; write \\% for a percent sign"
            raise self._fault(match, f"{problem}; {remedy}")
        return self._of_letter(match, letter)

    def _of_letter(self, match: re.Match[str], letter: str) -> str:
        if problem := _problem(letter, self._names.letters, match[0]):
            raise self._fault(match, f"{problem}; write \\{match[0]} for these characters")
        return self._names.letters[letter]

    def _of_variable(self, match: re.Match[str], name: str) -> str:
        if not self._is_source:
            return self._of_site(match, name)
        if name in (self._names.variables or ()):
            problem = f"${name} is on each node's own disk, from which nothing is copied back"
            raise self._fault(match, f"{problem}; have the script move results to shared storage")
        if _NOT_PASSED_ON.fullmatch(name):
            raise self._fault(match, f"{name} does not reach the stage; write its value")
        if name == "HOME" and self._names.home:
            return self._names.home
        try:
            value = self._names.environment[name]
        except KeyError:
            value = ""
        if not value:
            problem = f"{name} is not set in the job's environment; set it, or write its value"
            raise self._fault(match, f"{problem}")
        if _CONTROL.search(value):
            raise self._fault(match, f"{name} has a control character in it; write the path")
        return value

    def _of_site(self, match: re.Match[str], name: str) -> str:
        variables = self._names.variables
        if variables is None:
            return f"/${name}"
        if name not in variables:
            known = [*variables, *SPELLINGS]
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean ${near[0]}?" if near else f"known: ${' $'.join(known)}"
            problem = f"${name} is no variable of this site's disks; {hint}"
            raise self._fault(match, f"{problem} ({_IN_SCRIPT})")
        if match.start() > 0:
            raise self._fault(match, f"${name} can only begin a destination")
        try:
            return fill_letters(variables[name], self._names.letters)
        except ValueError as error:
            raise self._fault(match, f"${name} is {variables[name]}: {error}") from None

    def _fault(self, match: re.Match[str], problem: str) -> DirectiveError:
        return self._piece.fault(problem, match.start())
