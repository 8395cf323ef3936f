r"""What does a ``--stage`` value, or a ``#STAGE`` line, ask for? Directives, by the only grammar.

Both are ``SRC:DST[,key=value…]``, several joined by ``;``. SRC ends at the first ``:/``, ``:$`` or
``:shared:/`` behind its scheme. ``shared:/PATH`` is in a filesystem of the job's own disks; without
SRC, it is an empty folder there. A ``,`` separates only behind that, and before what looks like the
name of an option. A backslash before ``: , ; $ % \`` takes its meaning away; before anything else
it is itself. Blanks before SRC are dropped, and those at the end of a line.

``@FILE`` as SRC is a file of the user's with a URL that has a secret; see `launch.credentials`.

The names in SRC and DST are filled in (`names`), so that a Directive has plain paths.

``parse_value(print_value(directives), names) == directives``. Every fault is a DirectiveError,
which shows its place by a caret. `Tolerance` reads how many nodes may fail.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from stager.base.errors import DirectiveError, UsageError
from stager.base.formats import ARCHIVES, COMPRESSIONS, archive_suffix, compressed_suffix
from stager.base.options import CONFLICTS, DEFAULT_OPTIONS, ITSELF, OPTION_TYPES, Options
from stager.base.text import printable
from stager.request.lexer import (
    BLANKS,
    OPTION,
    SEPARATOR,
    SOURCE_END,
    Piece,
    escape,
    read,
    scheme_end,
    source_end,
)
from stager.source.schemes import Location, Scheme, is_url_file

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stager.request.names import Names


#: How a destination begins that is in a filesystem of the job's own disks.
SHARED = "shared:"


@dataclass(frozen=True, slots=True)
class Directive:
    """What a user asks for: a copy of ``source`` at ``destination`` on every node.

    With ``shared:`` before its path, the destination is in a filesystem of the job's own disks, and
    is to be an empty folder if the source is empty.
    """

    source: str
    destination: str
    options: Options = DEFAULT_OPTIONS

    def __str__(self) -> str:
        """Return the directive as it is written in a ``--stage`` value."""
        options = (
            f",{key}={escape(value)}" if value else f",{key}" for key, value in self.options.given()
        )
        path = self.destination.removeprefix(SHARED)
        shared = SHARED if self.destination.startswith(SHARED) else ""
        return f"{escape(self.source)}:{shared}{escape(path)}{''.join(options)}"


def print_value(directives: Iterable[Directive]) -> str:
    """Return the ``--stage`` value that `grammar.parse_value` reads back as ``directives``.

    >>> print_value([Directive("/shared/a:/b", "/nvme/a"), Directive("/shared/c,d", "/nvme/")])
    '/shared/a\\\\:/b:/nvme/a;/shared/c\\\\,d:/nvme/'
    """
    return ";".join(str(directive) for directive in directives)


#: Most bytes of a ``--stage`` value: STAGE_LIST_MAX in prolog/spank/stage.h. Slurm carries it in
#: one environment variable, which the kernel limits to 128 KiB (MAX_ARG_STRLEN).
MAX_LIST = 120 * 1024
#: How a source ends before a destination that is a URL.
_SCHEME_BEHIND = re.compile(r":[A-Za-z][A-Za-z0-9+.-]*\Z")
_NAME = re.compile("[A-Za-z_]+")
#: What may follow STAGE_ in the name of a variable, and what is slurm-stage's own there.
_VARIABLE = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
RESERVED = {
    "DIRECTIVES", "FAILED_NODES", "HELPER", "ON_HOSTS", "PARENT", "PEER_KEY", "QUIET", "REQUEST",
    "SHARDS", "SHARED", "TOLERATE", "URL_SECRETS",
}  # fmt: skip
#: The options whose values are words, and those.
_CHOICES = {
    name: [str(word) for word in kind]
    for name, kind in OPTION_TYPES.items()
    if issubclass(kind, StrEnum)
}
_LINE = "#STAGE SRC:DST[,key=value…]"
#: How a line begins that was written like an ``#SBATCH`` line.
_OPTION_OF_SBATCH = re.compile(r"#STAGE\s+(--stage(?:=|(?=\s)|$))")
NO_PATH = "write '/' behind shared:, as in shared:/data/"
_COMMENT = re.compile(r"[ \t]#")
#: An option behind a blank.
_OPTION_AFTER_SPACE = re.compile(
    rf"\s(?:({'|'.join(OPTION_TYPES)})=|(?:extract|decompress|replace)(?:\s|$))"
)


def parse_value(text: str, names: Names) -> tuple[Directive, ...]:
    """Return the directives of one ``--stage`` value.

    >>> from stager.request.names import Names
    >>> names = Names({"j": "17"}, {}, {"DATA": "/shared"}, folder="/home/al", home="/home/al")
    >>> [directive] = parse_value("$DATA/env:/nvme/%j/env,relocate=no", names)
    >>> directive.source, directive.destination, str(directive.options)
    ('/shared/env', '/nvme/17/env', 'validate=stat, relocate=no')

    Raise DirectiveError, or UsageError if the value is longer than MAX_LIST.
    """
    size = len(os.fsencode(text))
    if size > MAX_LIST:
        raise UsageError(
            f"the --stage value has {size} bytes; {MAX_LIST} are allowed: write #STAGE lines in "
            "the batch script, or stage an archive instead of many files"
        )
    whole = read(text)
    if whole.seen.endswith("\\"):  # it would escape the ';' by which Slurm's plugin joins values
        problem = "a backslash ends the value"
        raise whole.fault(f"{problem}; write two where it is part of a path", len(whole.seen) - 1)
    return tuple(_directive(piece, names) for piece in whole.split(SEPARATOR))


def with_values(text: str, names: Names) -> str:
    """Return a ``--stage`` value whose sources have what variables stand for that are set here.

    The ``text`` must be right. Others stay as they are.
    """
    for piece in reversed(read(text).split(SEPARATOR)):
        source, _ = _split_paths(_without_blanks(piece), "")
        for match, value in reversed(list(names.set_variables(source))):
            begin, end = (source.places[at] for at in match.span())
            text = text[:begin] + escape(value) + text[end:]
    return text


def parse_line(line: str, names: Names) -> tuple[Directive, ...]:
    """Return the directives of one ``#STAGE`` line. Raise DirectiveError."""
    start = len("#STAGE")
    text = line.rstrip("\r\n")
    if text[start:] and text[start] not in BLANKS:
        raise DirectiveError(f"write a space behind #STAGE: {_LINE}", text, start)
    if found := _OPTION_OF_SBATCH.match(text):
        raise DirectiveError(f"leave out {found[1]}: write {_LINE}", text, found.start(1))
    if comment := _COMMENT.search(text, start):
        problem = "no comment can follow here; remove it"
        remedy = "for a path with ' #', write it in quotes: #SBATCH '--stage=SRC:DST'"
        raise DirectiveError(f"{problem} ({remedy})", text, comment.end() - 1)
    whole = read(text, start)
    kept = whole.part(0, len(whole.value.rstrip(BLANKS)))
    return tuple(_directive(piece, names) for piece in kept.split(SEPARATOR))


def _is_line(piece: Piece) -> bool:
    return piece.text.startswith("#STAGE")


def _in_path(char: str, piece: Piece) -> str:
    """Return how a character is written that is part of a path."""
    twice = "" if _is_line(piece) else f" (in an #SBATCH line \\\\{char})"
    return f"write \\{char} where it is part of a path{twice}"


def _directive(piece: Piece, names: Names) -> Directive:
    piece = _without_blanks(piece)
    form = _LINE if _is_line(piece) else "SRC:DST"
    if not piece.value:
        raise piece.fault(f"source and destination are missing: write {form}")
    source, rest = _split_paths(piece, form)
    destination, *options = rest.split(OPTION)
    shared = SHARED if destination.seen.startswith(SHARED) else ""
    destination = destination.behind(len(shared))
    _check_destination(destination, shared)
    filled = names.destination(destination)
    _check_filled(destination, filled)
    if shared and not source.value:
        if options:
            raise options[0].fault("an empty folder takes no options; remove this one")
        return Directive("", shared + filled)
    _check_source(source)
    path = names.source(source)
    chosen = _Chosen()
    for option in options:
        chosen.read(option)
    given = Options.from_json(chosen.values)
    if names.is_filled(path):  # else the job will check it
        _check_url(source, path)
        # The name of a URL in a file is not known here.
        if problem := "" if is_url_file(path) else misfit(path, given):
            pattern = "; for files in a folder write a pattern: decompress=*"
            raise source.fault(problem + (pattern if "'decompress'" in problem else ""))
    for option in options:
        chosen.check(option, path)
    return Directive(path, shared + filled, given)


def _without_blanks(piece: Piece) -> Piece:
    return piece.behind(len(piece.value) - len(piece.value.lstrip(BLANKS)))


def _split_paths(piece: Piece, form: str) -> tuple[Piece, Piece]:
    """Return the source, and the destination with its options."""
    found = source_end(piece)
    if not found:
        colon = piece.seen.find(":", scheme_end(piece))
        shared = piece.seen.find(f":{SHARED}", scheme_end(piece))
        if shared >= 0:
            raise piece.fault(NO_PATH, shared + 1 + len(SHARED))
        if colon < 0:
            raise piece.fault(f"no ':' between source and destination: write {form}", -1)
        problem = "the destination must begin with '/' or a variable of the site, right behind ':'"
        raise piece.fault(f"{problem}: write {form}", colon + 1)
    source, rest = piece.part(0, found.start()), piece.behind(found.end())
    if rest.seen.startswith("//") and (behind := _SCHEME_BEHIND.search(source.seen)):
        problem = "the destination is a URL; choose a path on the nodes' disks"
        raise piece.fault(problem, behind.start() + 1)
    begin = len(SHARED) if rest.seen.startswith(SHARED) else 0
    if second := SOURCE_END.search(rest.seen, begin):
        problem = "a second ':' before a path; write ';' before another SRC:DST, or"
        raise rest.fault(f"{problem} {_in_path(':', piece)}", second.start())
    return source, rest


def _check_source(source: Piece) -> None:
    if not source.value:
        problem = "the source is empty"
        raise source.fault(
            f"{problem}; an empty folder can be made in shared: only, by :shared:/DIR"
        )
    if source.seen[0] in "\"'":
        problem = "the source begins with a quotation mark; remove the quotes, a blank needs none"
        raise source.fault(f"{problem} (write ./ before a name that begins with one)")


def _check_destination(destination: Piece, shared: str) -> None:
    if shared and not destination.seen.startswith("/"):
        raise destination.fault(NO_PATH)
    if destination.seen[-1] in BLANKS:
        at = len(destination.seen) - 1
        raise destination.fault("a blank ends the destination; remove it", at)
    if found := _OPTION_AFTER_SPACE.search(destination.seen):
        problem = "write ',', without a blank, before an option"
        raise destination.fault(problem, found.start())


def _check_filled(destination: Piece, path: str) -> None:
    if not path.startswith("/"):
        raise destination.fault("the destination must begin with '/' or a variable of the site")
    if ".." in path.split("/"):
        raise destination.fault("'..' is not allowed in a destination")


def _check_url(source: Piece, path: str) -> None:
    if Scheme.of(path).is_url:
        try:
            Location.parse(path)
        except ValueError as error:
            raise source.fault(f"the source {error}") from None


def misfit(source: str, options: Options) -> str:
    """Return why the name of a source does not fit the ``options``, nothing if it does."""
    is_packed = not Scheme.of(source).is_made  # whatever its tag ends in
    if options.extract and not (is_packed and archive_suffix(source)):
        return f"'extract' needs an archive as source: {' '.join(ARCHIVES)}"
    if options.decompress == ITSELF and not (is_packed and compressed_suffix(source)):
        return f"'decompress' needs a compressed file as source: {' '.join(COMPRESSIONS)}"
    return ""


class _Chosen:
    """The options of one directive; ``values`` are those of `Options` by key.

    How a value is read depends on the type of the option's default in `Options`, so that a new
    option is added there alone. An option that is a text is read by a function of its own.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def read(self, option: Piece) -> None:
        """Add an option to ``values``. Raise DirectiveError."""
        key = _key(option)
        kind = self._type(option, key)
        equals, value = option.value[len(key) :][:1], option.behind(len(key) + 1)
        if equals not in ("", "="):
            raise self._behind(option, key)
        if kind is bool:
            if equals:
                raise option.fault(f"'{key}' takes no value", len(key))
            self.values[key] = True
            return
        if key == "decompress" and self._is_given_apart(equals):
            raise option.fault("'decompress' is given twice")
        if key == "decompress" and not equals:
            self.values[key] = ITSELF
            return
        if not equals:
            choices = " or ".join(kind) if issubclass(kind, StrEnum) else "…"
            raise option.fault(f"'{key}' needs a value: {key}={choices}")
        if issubclass(kind, StrEnum):
            self.values[key] = self._choice(kind, value)
        elif kind is tuple:
            self.values[key] = (*self.values.get(key, ()), self._pattern(value))
        else:
            self.values[key] = {"by": self._numbered_pattern, "as": self._variable}[key](value)

    def _behind(self, option: Piece, key: str) -> DirectiveError:
        """Return the fault of a comma behind an option that no other option follows."""
        problem = "no option follows ','; write one, or remove ','"
        if option.value[len(key) + 1 :].lstrip(BLANKS).startswith("/"):
            problem = "write ';', not ',', before another SRC:DST"
        return option.fault(problem, len(key))

    def _is_given_apart(self, equals: str) -> bool:
        """Whether decompress was given without a pattern, or is now, but not only."""
        before = self.values.get("decompress", ())
        return before == ITSELF or bool(before and not equals)

    def check(self, option: Piece, source: str) -> None:
        """Raise DirectiveError for an ``option`` that does not fit the others, or the source."""
        key, given = _key(option), self._given()
        if key == "by" and "mode=shard" not in given:
            raise option.fault(f"'{key}' needs mode=shard")
        for other, refused in CONFLICTS.items():
            if other in given and not refused.isdisjoint((key, option.value)):
                raise option.fault(f"'{option.value}' cannot be combined with {other}")
        if option.value == "layout=hub" and Scheme.of(source) is not Scheme.HF:
            raise option.fault("'layout=hub' needs a model of a hub as source: hf://…")

    def _given(self) -> set[str]:
        """Return the names of the options, and those whose values are words with their values."""
        return {*self.values, *(f"{key}={value}" for key, value in self.values.items())}

    def _type(self, option: Piece, key: str) -> type:
        """Return the type of the option's value. Raise DirectiveError unless it may be given."""
        kind = OPTION_TYPES.get(key)
        if kind is None:
            lower = key.lower()
            # The value of an option may stand alone: shard for mode=shard.
            near = [f"{name}={lower}" for name, kind in _CHOICES.items() if lower in kind]
            near += difflib.get_close_matches(lower, OPTION_TYPES)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(OPTION_TYPES)}."
            raise option.fault(f"unknown option '{key}'; {hint} If not, {_in_path(',', option)}")
        if key in self.values and kind is not tuple:
            raise option.fault(f"'{key}' is given twice")
        return kind

    def _choice(self, choices: type[StrEnum], value: Piece) -> StrEnum:
        try:
            return choices(value.value)
        except ValueError:
            known = ", ".join(choices)
            raise value.fault(f"'{printable(value.value)}' is not one of {known}") from None

    def _variable(self, value: Piece) -> str:
        if not _VARIABLE.fullmatch(value.value):
            raise value.fault(
                f"'{printable(value.value)}' cannot be part of a variable's name; write at most 64 "
                "letters without accents, digits and _, and no digit first"
            )
        if value.value in RESERVED:
            raise value.fault(f"STAGE_{value.value} is slurm-stage's own; choose another name")
        return value.value

    def _pattern(self, value: Piece) -> str:
        from stager.tree.patterns import is_pattern  # which takes a while to import

        if not is_pattern(value.value):
            problem = f"'{printable(value.value)}' is not a valid pattern"
            remedy = "write it as in a .gitignore, but not with ! or # at its beginning"
            raise value.fault(f"{problem}; {remedy}")
        return value.value

    def _numbered_pattern(self, value: Piece) -> str:
        from stager.tree.patterns import NUMBER, is_numbered_pattern  # as slow

        if not is_numbered_pattern(value.value):
            raise value.fault(
                f"'{printable(value.value)}' is not a valid pattern; write {NUMBER} once, in place "
                f"of the number, and at most two * in each name, as in part-{NUMBER}.*"
            )
        return value.value


def _key(option: Piece) -> str:
    """Return the name of an option, which all of them begin with."""
    found = _NAME.match(option.value)
    assert found
    return found[0]


_TEXT = re.compile(r"(\d{1,6})(%?)", re.ASCII)
_ALL = 100


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The most nodes that may fail: ``number`` of them, or that many percent of the job's nodes."""

    number: int
    is_percent: bool = False

    @classmethod
    def parse(cls, value: object) -> Tolerance:
        """Return the tolerance for a number, or a text such as ``2`` or ``10%``. Raise ValueError.

        >>> Tolerance.parse("10%")
        Tolerance(number=10, is_percent=True)
        """
        found = _TEXT.fullmatch(value if isinstance(value, str) else "")
        if type(value) is int and value >= 0:
            return cls(value)
        if not found or (found[2] and int(found[1]) > _ALL):
            raise ValueError('must be a number of nodes, or a share of them such as "10%"')
        return cls(int(found[1]), bool(found[2]))

    def __str__(self) -> str:
        return f"{self.number}{'%' if self.is_percent else ''}"

    def of(self, nodes: int) -> int:
        """Return how many of so many nodes may fail, rounded down.

        >>> Tolerance(10, is_percent=True).of(39)
        3
        """
        return nodes * self.number // _ALL if self.is_percent else min(self.number, nodes)


def asked_tolerance(text: str, option: str, default: Tolerance) -> Tolerance:
    """Return what a user's ``option`` asks for, or the site's ``default`` if it has no text.

    Raise UsageError.
    """
    try:
        return Tolerance.parse(text) if text else default
    except ValueError:
        raise UsageError(
            f"{option}={text}: write a number of nodes, or a share of the job's nodes such as 10%"
        ) from None
