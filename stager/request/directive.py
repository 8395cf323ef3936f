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
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stager.base.errors import DirectiveError, UsageError
from stager.base.formats import ARCHIVES, archive_suffix
from stager.base.options import DEFAULT_OPTIONS, Lifetime, Mode, Options, Relocate, Validate, Verify
from stager.base.text import printable
from stager.request.lexer import Char, Field, escape, field, read_escapes, split, split_words, strip

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

#: Longest list of directives that a job may carry, in characters. It travels in one environment
#: variable, which the kernel limits to 128 KiB (MAX_ARG_STRLEN), and grows there by escapes.
MAX_LIST = 32 * 1024
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/:,;\\]*(:[0-9]+)?")
_NO_URL = "the {} is a URL; only files can be staged"
_Option = Validate | Verify | Lifetime | Relocate | Mode


@dataclass(frozen=True, slots=True)
class Directive:
    """One wish: ``source`` is to lie at ``destination`` on every node."""

    source: str
    destination: str
    options: Options = DEFAULT_OPTIONS

    def __str__(self) -> str:
        options = (
            f",{key}={escape(value)}" if value else f",{key}" for key, value in self.options.given()
        )
        return f"{escape(self.source)}:{escape(self.destination)}{''.join(options)}"


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


def parse_value(text: str) -> tuple[Directive, ...]:
    """The directives of one ``--stage`` value. Raises DirectiveError."""
    _check_length(text)
    chars = read_escapes(text)
    parts = split(chars, ";", len(text))
    return tuple(_parse_part(text, part, end) for part, end in parts)


def print_value(directives: Iterable[Directive]) -> str:
    """The ``--stage`` value that `parse_value` reads back as ``directives``."""
    return ";".join(str(directive) for directive in directives)


def merge(directives: Iterable[Directive]) -> tuple[Directive, ...]:
    """Each different directive once, in order: an option may reach a job by two ways."""
    merged = tuple(dict.fromkeys(directives))
    _check_length(print_value(merged))
    return merged


def _check_length(text: str) -> None:
    if len(text) > MAX_LIST:
        message = f"the list of directives has {len(text)} characters; {MAX_LIST} are allowed"
        raise UsageError(f"{message}: stage an archive instead of many files")


def _parse_part(text: str, chars: list[Char], end: int) -> Directive:
    fields = split(chars, ",", end)
    (paths, paths_end), options = fields[0], fields[1:]
    paths = strip(paths)
    if not paths:
        raise DirectiveError("an empty directive: write SRC:DST", text, paths_end)
    url = _URL.match("".join(c.char for c in paths))
    protected = url.end() if url else 0
    pieces = split(paths[protected:], ":", paths_end)
    if len(pieces) == 1:
        raise DirectiveError("no ':' between source and destination", text, paths_end)
    if len(pieces) > 2:
        behind = field([char for char in paths if char.at > pieces[0][1]], paths_end)
        if _URL.match(behind.value):
            raise DirectiveError(_NO_URL.format("destination"), text, behind.at)
        raise DirectiveError(
            "a second ':'; write \\: for one that belongs to a path", text, pieces[1][1]
        )
    (source, source_end), (destination, destination_end) = pieces
    return _build(
        text,
        field(paths[:protected] + source, source_end),
        field(destination, destination_end),
        [field(option, option_end) for option, option_end in options],
    )


def parse_line(line: str) -> Directive:
    bad = next((at for at, c in enumerate(line) if ord(c) < ord(" ") and c != "\t"), None)
    if bad is not None:
        raise DirectiveError("a control character is not allowed in a directive", line, bad)
    words = split_words(line, len("#STAGE"), sbatch=False)
    if len(words) < 2 or "=" in words[1].value.partition("/")[0]:
        hint = "source and destination stand apart: #STAGE SRC DST [key=value…]"
        raise DirectiveError(hint, line, len(line.rstrip()))
    return _build(line, words[0], words[1], words[2:])


def _build(text: str, source: Field, destination: Field, options: Sequence[Field]) -> Directive:
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
        field = Field(value, option.at + len(key) + 1)
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
    return Directive(source.value, destination.value, Options(**chosen, **patterns))  # type: ignore[arg-type]


def _check_path(text: str, path: Field, what: str) -> None:
    if not path.value:
        raise DirectiveError(f"the {what} is empty", text, path.at)
    if _URL.match(path.value):
        raise DirectiveError(_NO_URL.format(what), text, path.at)
    if not path.value.startswith("/"):
        problem = f"the {what} must be an absolute path ($VARIABLES and ~ are not expanded here)"
        raise DirectiveError(problem, text, path.at)
    if what == "destination" and ".." in path.value.split("/"):
        raise DirectiveError("'..' is not allowed in a destination", text, path.at)


def _check_archive(text: str, source: Field) -> None:
    if not archive_suffix(source.value):
        known = " ".join(ARCHIVES)
        raise DirectiveError(f"'extract' is for archives: {known}", text, source.at)


def _check_mode(text: str, option: Field, chosen: Mapping[str, _Option | bool | str]) -> None:
    """Raise DirectiveError for an ``option`` that has no sense with the mode."""
    key = option.value.partition("=")[0]
    is_shard = chosen.get("mode") is Mode.SHARD
    if key == _BY and not is_shard:
        raise DirectiveError(f"'{key}' is for mode=shard", text, option.at)
    if is_shard and (key == _FLAG or chosen.get(key) is Relocate.VENV):
        raise DirectiveError(f"'{key}' has no sense with mode=shard", text, option.at)


def _check_key(text: str, option: Field, key: str, seen: Container[str]) -> None:
    if key in seen:
        raise DirectiveError(f"'{key}' is given twice", text, option.at)
    if key not in _KNOWN:
        key = printable(key)
        near = difflib.get_close_matches(key, _KNOWN)
        hint = f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(_KNOWN)}"
        raise DirectiveError(f"unknown option '{key}'{hint}", text, option.at)


def _pattern(text: str, value: Field) -> str:
    from stager.tree.patterns import is_pattern  # which takes a while to import

    if not is_pattern(value.value):
        shown = printable(value.value)
        problem = f"'{shown}' is no pattern as in a .gitignore (without ! and #)"
        raise DirectiveError(problem, text, value.at)
    return value.value


def _numbered(text: str, value: Field) -> str:
    from stager.tree.patterns import (
        NUMBER,
        is_numbered_pattern,  # which takes a while to import
    )

    if not is_numbered_pattern(value.value):
        shown = printable(value.value)
        problem = (
            f"'{shown}' is no pattern with {NUMBER} in the place of a number, and at most two * in "
            f"a name: part-{NUMBER}.*"
        )
        raise DirectiveError(problem, text, value.at)
    return value.value


def _choice(text: str, value: Field, choices: type[_Option]) -> _Option:
    try:
        return choices(value.value)
    except ValueError:
        known = ", ".join(choices)
        problem = f"'{printable(value.value)}' is none of {known}"
        raise DirectiveError(problem, text, value.at) from None
