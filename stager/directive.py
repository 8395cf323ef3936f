r"""Text of a ``--stage`` value or of ``#STAGE`` lines in, Directives out: the only grammar.

A value is ``SRC:DST[,key=value…]``, several joined by ``;``. A backslash before ``:`` ``,``
``;`` ``\`` or a blank takes that character as it is; other blanks around a field are dropped.
The colons of a URL's ``scheme://host:port`` separate nothing.

A line is ``#STAGE SRC DST [key=value…]``, with a shell's quoting, in the script's head: the
comment lines before its first command, where ``#SBATCH`` lines stand too.

``parse(print(directives)) == directives``, and every fault is a DirectiveError with a caret.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from stager.errors import DirectiveError, UsageError, printable

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

#: Longest list of directives that a job may carry, in characters. It travels in one environment
#: variable, which the kernel limits to 128 KiB (MAX_ARG_STRLEN), and grows there by escapes.
MAX_LIST = 32 * 1024

#: The archives that can be unpacked, by the ends of their names.
ARCHIVES = (
    ".tar.gz", ".tgz", ".tar.zst", ".tzst", ".tar.xz", ".txz", ".tar", ".zip",
)  # fmt: skip

_ESCAPED = ":,;\\"
_BLANKS = " \t"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/:,;\\]*(:[0-9]+)?")
_NO_URL = "the {} is a URL; only files can be staged"
_LINE = re.compile(r"#STAGE(?=\s|$)")


class Validate(StrEnum):
    """What makes a node's copy current; see `survey.judge`."""

    STAT = "stat"
    SIZE = "size"
    CHECKSUM = "checksum"
    ALWAYS = "always"


class Verify(StrEnum):
    """What is compared with the source's digest before a copy is published."""

    #: The bytes as they passed on their way; nothing is read again.
    STREAM = "stream"
    #: The written file, read again from the disk past its cache.
    READBACK = "readback"


class Lifetime(StrEnum):
    """How long a copy stays on a node."""

    #: Until its room is needed for something else.
    CACHE = "cache"
    #: Until the last job that uses it has ended.
    JOB = "job"


class Relocate(StrEnum):
    """What is changed in a folder so that it works where it comes to lie; see `relocate`."""

    NONE = "none"
    #: A Python virtual environment's own path in its scripts.
    VENV = "venv"


class Mode(StrEnum):
    """What of a folder each node gets."""

    #: All of it.
    COPY = "copy"
    #: A part: each file is on one node; see `shard`.
    SHARD = "shard"


_Option = Validate | Verify | Lifetime | Relocate | Mode


@dataclass(frozen=True, slots=True)
class Directive:
    """One wish: ``source`` is to lie at ``destination`` on every node."""

    source: str
    destination: str
    validate: Validate = Validate.STAT
    verify: Verify = Verify.STREAM
    lifetime: Lifetime = Lifetime.CACHE
    relocate: Relocate = Relocate.NONE
    #: Of a folder: what of it alone is staged, and what is not; see `patterns`.
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    #: Whether the source is an archive, whose files are wanted.
    extract: bool = False
    mode: Mode = Mode.COPY
    #: With mode=shard, a pattern that tells a file's part by a number in its path; see `shard`.
    by: str = ""

    def __str__(self) -> str:
        options = (
            f",{key}={escape(value)}" if value else f",{key}" for key, value in chosen_options(self)
        )
        return f"{escape(self.source)}:{escape(self.destination)}{''.join(options)}"


def chosen_options(wish: object) -> Iterator[tuple[str, str]]:
    """What of the options is not as usual, of a Directive or of what has the same; with its value.

    That which takes no value has an empty one.
    """
    for option in fields(Directive)[2:]:  # behind the paths
        value = getattr(wish, option.name)
        if value == option.default:
            continue
        values = value if isinstance(value, tuple) else ("" if value is True else value,)
        yield from ((option.name, one) for one in values)


#: The keys that may stand behind a destination, and their values.
_OPTIONS: dict[str, type[_Option]] = {
    "validate": Validate,
    "verify": Verify,
    "lifetime": Lifetime,
    "relocate": Relocate,
    "mode": Mode,
}
#: Those that may be given more than once, with a pattern each.
_PATTERNS = ("include", "exclude")
#: That which takes no value, and that which takes a pattern with a number in it.
_FLAG, _BY = "extract", "by"
_KNOWN = (*_OPTIONS, *_PATTERNS, _FLAG, _BY)


class _Char(NamedTuple):
    """A character of a value, where it stood, and whether a backslash made it literal."""

    char: str
    at: int
    literal: bool


class _Field(NamedTuple):
    """A piece of a directive and where it stood in the text."""

    value: str
    at: int


def parse_value(text: str) -> tuple[Directive, ...]:
    """The directives of one ``--stage`` value. Raises DirectiveError."""
    _check_length(text)
    chars = _read_escapes(text)
    parts = _split(chars, ";", len(text))
    return tuple(_parse_part(text, part, end) for part, end in parts)


def print_value(directives: Iterable[Directive]) -> str:
    """The ``--stage`` value that `parse_value` reads back as ``directives``."""
    return ";".join(str(directive) for directive in directives)


def head(lines: Iterable[str]) -> Iterator[str]:
    """The lines of a batch script that sbatch looks at: comments up to the first command."""
    for line in lines:
        if line.strip() and not line.lstrip().startswith("#"):
            return
        yield line.rstrip("\r\n")


def parse_script(lines: Iterable[str]) -> tuple[Directive, ...]:
    """The directives of the ``#STAGE`` lines in a batch script's head. Raises DirectiveError."""
    return tuple(_parse_line(line) for line in head(lines) if _LINE.match(line))


def sbatch_values(lines: Iterable[str]) -> list[str]:
    """The values of ``--stage`` on a batch script's ``#SBATCH`` lines, as sbatch reads them.

    Raises DirectiveError for a line whose quotes do not match.
    """
    values: list[str] = []
    for line in head(lines):
        if not line.startswith("#SBATCH"):
            continue
        words = iter(_words(line, len("#SBATCH"), sbatch=True))
        for word in words:
            if word.value.startswith("--stage="):
                values.append(word.value.removeprefix("--stage="))
            elif word.value == "--stage":
                values += [value.value for value in islice(words, 1)]
    return values


def merge(directives: Iterable[Directive]) -> tuple[Directive, ...]:
    """Each different directive once, in order: an option may reach a job by two ways."""
    merged = tuple(dict.fromkeys(directives))
    _check_length(print_value(merged))
    return merged


def _check_length(text: str) -> None:
    if len(text) > MAX_LIST:
        message = f"the list of directives has {len(text)} characters; {MAX_LIST} are allowed"
        raise UsageError(f"{message}: stage an archive instead of many files")


def escape(path: str) -> str:
    """A path or pattern as it stands in a ``--stage`` value."""
    escaped = "".join(f"\\{c}" if c in _ESCAPED else c for c in path)
    stripped = escaped.rstrip(_BLANKS)
    return stripped + "".join(f"\\{c}" for c in escaped[len(stripped) :])


def _read_escapes(text: str) -> list[_Char]:
    chars: list[_Char] = []
    at = 0
    while at < len(text):
        char = text[at]
        if ord(char) < ord(" ") and char != "\t":
            raise DirectiveError("a control character is not allowed in a directive", text, at)
        if char != "\\":
            chars.append(_Char(char, at, literal=False))
            at += 1
            continue
        following = text[at + 1 : at + 2]
        if not following or following not in _ESCAPED + _BLANKS:
            raise DirectiveError("a backslash stands before : , ; \\ or a blank only", text, at)
        chars.append(_Char(following, at + 1, literal=True))
        at += 2
    return chars


def _split(chars: list[_Char], separator: str, end: int) -> list[tuple[list[_Char], int]]:
    """The runs of ``chars`` between separators, each with the position where it ended."""
    parts: list[tuple[list[_Char], int]] = []
    run: list[_Char] = []
    for char in chars:
        if char.char == separator and not char.literal:
            parts.append((run, char.at))
            run = []
        else:
            run.append(char)
    return [*parts, (run, end)]


def _strip(chars: list[_Char]) -> list[_Char]:
    def blank(char: _Char) -> bool:
        return char.char in _BLANKS and not char.literal

    first, last = 0, len(chars)
    while first < last and blank(chars[first]):
        first += 1
    while last > first and blank(chars[last - 1]):
        last -= 1
    return chars[first:last]


def _field(chars: list[_Char], end: int) -> _Field:
    stripped = _strip(chars)
    at = stripped[0].at if stripped else end
    return _Field("".join(c.char for c in stripped), at)


def _parse_part(text: str, chars: list[_Char], end: int) -> Directive:
    fields = _split(chars, ",", end)
    (paths, paths_end), options = fields[0], fields[1:]
    paths = _strip(paths)
    if not paths:
        raise DirectiveError("an empty directive: write SRC:DST", text, paths_end)
    url = _URL.match("".join(c.char for c in paths))
    protected = url.end() if url else 0
    pieces = _split(paths[protected:], ":", paths_end)
    if len(pieces) == 1:
        raise DirectiveError("no ':' between source and destination", text, paths_end)
    if len(pieces) > 2:
        behind = _field([char for char in paths if char.at > pieces[0][1]], paths_end)
        if _URL.match(behind.value):
            raise DirectiveError(_NO_URL.format("destination"), text, behind.at)
        raise DirectiveError(
            "a second ':'; write \\: for one that belongs to a path", text, pieces[1][1]
        )
    (source, source_end), (destination, destination_end) = pieces
    return _build(
        text,
        _field(paths[:protected] + source, source_end),
        _field(destination, destination_end),
        [_field(option, option_end) for option, option_end in options],
    )


def _parse_line(line: str) -> Directive:
    bad = next((at for at, c in enumerate(line) if ord(c) < ord(" ") and c != "\t"), None)
    if bad is not None:
        raise DirectiveError("a control character is not allowed in a directive", line, bad)
    words = _words(line, len("#STAGE"), sbatch=False)
    if len(words) < 2 or "=" in words[1].value.partition("/")[0]:
        hint = "source and destination stand apart: #STAGE SRC DST [key=value…]"
        raise DirectiveError(hint, line, len(line.rstrip()))
    return _build(line, words[0], words[1], words[2:])


def _words(line: str, start: int, *, sbatch: bool) -> list[_Field]:
    """The words of ``line`` from ``start`` on, up to a comment, as a shell or ``sbatch`` splits it.

    (The standard library's splitter tells no positions, and knows comments only as sbatch does.)
    """
    words: list[_Field] = []
    word: _Field | None = None
    for text, at, plain in _unquote(line, start, sbatch=sbatch):
        if plain and text == "#" and (sbatch or word is None):
            break
        if plain and text in _BLANKS:
            words += [word] if word else []
            word = None
        else:
            word = _Field(word.value + text, word.at) if word else _Field(text, at)
    return [*words, word] if word else words


def _unquote(line: str, start: int, *, sbatch: bool) -> Iterator[tuple[str, int, bool]]:
    """Each character with its position, and whether it stands outside of quotes and escapes.

    A backslash takes the next character as it is: for a shell not within single quotes, and within
    double ones only what would have a meaning there. A quote itself becomes an empty text.
    """
    quote = ""
    at = start
    while at < len(line):
        char = line[at]
        if char == "\\" and (sbatch or quote != "'"):
            at += 1
            if at == len(line):
                raise DirectiveError("no escaped character", line, at)
            kept = "" if sbatch or not quote or line[at] in '"\\$`' else char
            yield kept + line[at], at - 1, False
        elif char == (quote or char) and char in "\"'":
            quote = "" if quote else char
            yield "", at, False
        else:
            yield char, at, not quote
        at += 1
    if quote:
        raise DirectiveError("no closing quotation", line, len(line))


def _build(text: str, source: _Field, destination: _Field, options: Sequence[_Field]) -> Directive:
    _check_path(text, source, "source")
    _check_path(text, destination, "destination")
    chosen: dict[str, _Option | bool | str] = {}
    patterns: dict[str, tuple[str, ...]] = {}
    for option in options:
        key, equals, value = option.value.partition("=")
        _check_key(text, option, key, chosen)
        if key == _FLAG:
            if equals:
                raise DirectiveError(f"'{key}' takes no value", text, option.at + len(key))
            chosen[key] = True
            continue
        if not equals:
            raise DirectiveError(f"'{key}' needs a value: {key}=…", text, option.at)
        field = _Field(value, option.at + len(key) + 1)
        if key == _BY:
            chosen[key] = _numbered(text, field)
        elif key in _PATTERNS:
            patterns[key] = (*patterns.get(key, ()), _pattern(text, field))
        else:
            chosen[key] = _choice(text, field, _OPTIONS[key])
    if chosen.get(_FLAG):
        _check_archive(text, source)
    for option in options:
        _check_mode(text, option, chosen)
    return Directive(
        source.value, destination.value, **chosen, **patterns  # type: ignore[arg-type]
    )  # fmt: skip


def _check_path(text: str, path: _Field, what: str) -> None:
    if not path.value:
        raise DirectiveError(f"the {what} is empty", text, path.at)
    if _URL.match(path.value):
        raise DirectiveError(_NO_URL.format(what), text, path.at)
    if not path.value.startswith("/"):
        problem = f"the {what} must be an absolute path ($VARIABLES and ~ are not expanded here)"
        raise DirectiveError(problem, text, path.at)
    if what == "destination" and ".." in path.value.split("/"):
        raise DirectiveError("'..' is not allowed in a destination", text, path.at)


def archive_suffix(path: str) -> str:
    """The end of an archive's name by which it is known, or nothing."""
    return next((end for end in ARCHIVES if path.lower().endswith(end)), "")


def _check_archive(text: str, source: _Field) -> None:
    if not archive_suffix(source.value):
        known = " ".join(ARCHIVES)
        raise DirectiveError(f"'extract' is for archives: {known}", text, source.at)


def _check_mode(text: str, option: _Field, chosen: Mapping[str, _Option | bool | str]) -> None:
    """Raise DirectiveError for an ``option`` that has no sense with the mode."""
    key = option.value.partition("=")[0]
    is_shard = chosen.get("mode") is Mode.SHARD
    if key == _BY and not is_shard:
        raise DirectiveError(f"'{key}' is for mode=shard", text, option.at)
    if is_shard and (key == _FLAG or chosen.get(key) is Relocate.VENV):
        raise DirectiveError(f"'{key}' has no sense with mode=shard", text, option.at)


def _check_key(text: str, option: _Field, key: str, seen: Container[str]) -> None:
    if key in seen:
        raise DirectiveError(f"'{key}' is given twice", text, option.at)
    if key not in _KNOWN:
        key = printable(key)
        near = difflib.get_close_matches(key, _KNOWN)
        hint = f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(_KNOWN)}"
        raise DirectiveError(f"unknown option '{key}'{hint}", text, option.at)


def _pattern(text: str, value: _Field) -> str:
    from stager.patterns import is_pattern  # which takes a while to import

    if not is_pattern(value.value):
        shown = printable(value.value)
        problem = f"'{shown}' is no pattern as in a .gitignore (without ! and #)"
        raise DirectiveError(problem, text, value.at)
    return value.value


def _numbered(text: str, value: _Field) -> str:
    from stager.shard import NUMBER, is_pattern  # which takes a while to import

    if not is_pattern(value.value):
        shown = printable(value.value)
        problem = (
            f"'{shown}' is no pattern with {NUMBER} in the place of a number, and at most two * in "
            f"a name: part-{NUMBER}.*"
        )
        raise DirectiveError(problem, text, value.at)
    return value.value


def _choice(text: str, value: _Field, choices: type[_Option]) -> _Option:
    try:
        return choices(value.value)
    except ValueError:
        known = ", ".join(choices)
        problem = f"'{printable(value.value)}' is none of {known}"
        raise DirectiveError(problem, text, value.at) from None
