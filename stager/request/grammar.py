r"""Read directives from a ``--stage`` value or a ``#STAGE`` line: the only grammar.

A value is ``SRC:DST[,key=value…]``, several joined by ``;``. A backslash before ``:`` ``,`` ``;``
``\`` ``$`` ``%`` ``~`` or a blank makes that character part of a path. Other blanks before a path
and around an option are dropped; those at the end of a path belong to it. The colons in a URL's
``scheme://host:port`` separate nothing, nor does that before an image's tag.

``@FILE`` as SRC is a file of the user's with a URL that has a secret; see `launch.url_file`.

A line is ``#STAGE SRC DST [key=value…]``, with a shell's quoting.

What a shell or Slurm would expand elsewhere is not expanded in a path: it is refused, unless a
backslash or a line's single quotes make it part of the path.

``parse_value(print_value(directives)) == directives``. Every fault is a DirectiveError, which shows
its place by a caret.
"""

from __future__ import annotations

import difflib
import os
import re
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from stager.base.errors import DirectiveError, UsageError
from stager.base.formats import ARCHIVES, COMPRESSIONS, archive_suffix, compressed_suffix
from stager.base.options import ITSELF, OPTION_TYPES, FolderLayout, Mode, Options, Relocate
from stager.base.text import printable
from stager.request.directive import Directive
from stager.request.lexer import (
    BLANKS,
    Char,
    Field,
    check_characters,
    field,
    is_blank,
    lstrip,
    path_field,
    read_escapes,
    split,
    split_words,
)
from stager.source.image_name import is_image
from stager.source.location import Location, Scheme, is_url, is_url_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Most bytes of a ``--stage`` value: STAGE_LIST_MAX in prolog/spank/stage.h. Slurm carries it in
#: one environment variable, which the kernel limits to 128 KiB (MAX_ARG_STRLEN).
MAX_LIST = 120 * 1024
#: The part of a URL in which a colon separates nothing.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^/\s]*@)?[^/:,;\\]*(:[0-9]+)?")
#: The same of an image, as far as its tag or digest: another colon follows. enroot writes a '#'.
_IMAGE = re.compile(r"docker://[^/:#]*(:[0-9]+)?[/#][^:]*(:[\w.-]+)?(@sha256:\w*)?(?=:)", re.ASCII)
_NO_URL = "the destination is a URL; choose a path on the nodes' disks"
#: The options whose values are words, and those.
_CHOICES = {
    name: [str(word) for word in kind]
    for name, kind in OPTION_TYPES.items()
    if issubclass(kind, StrEnum)
}
_COMMA = "a ',' in a path is written \\, (in an #SBATCH line \\\\,)"
_LINE = "#STAGE SRC DST [key=value…]"
#: How the first word of a line begins that was written like an ``#SBATCH`` line.
_OPTION_OF_SBATCH = re.compile(r"--stage(=|$)")
_NOT_EXPANDED = {
    "$": "variables are not expanded here; write the value, or run stagectl stage in the script, "
    "where the shell expands variables",
    "%": "%j and the like are not expanded here; write the value, or run stagectl stage in the "
    "script, with $SLURM_JOB_ID and the like",
    "~": "~ is not expanded here; write the whole path",
}
#: An option behind a path, as it is written in a ``--stage`` value. (A path that looks like that
#: can be staged by ``--stage``, with a backslash before its comma.)
_OPTION_BEHIND = re.compile(rf",({'|'.join(OPTION_TYPES)})(?=[=,]|$)")

#: The same in a ``--stage`` value. (A path that ends like that can be staged by a ``#STAGE`` line.)
_OPTION_AFTER_SPACE = re.compile(rf"\s({'|'.join(OPTION_TYPES)})(?=[=\s]|$)")


def parse_value(text: str) -> tuple[Directive, ...]:
    """Return the directives of one ``--stage`` value.

    >>> [directive] = parse_value("/shared/env:/nvme/env,relocate=venv")
    >>> directive.destination, str(directive.options)
    ('/nvme/env', 'validate=stat, relocate=venv')

    Raise DirectiveError, or UsageError if the value is longer than MAX_LIST.
    """
    size = len(os.fsencode(text))
    if size > MAX_LIST:
        raise UsageError(
            f"the --stage value has {size} bytes; {MAX_LIST} are allowed: write #STAGE lines in "
            "the batch script, or stage an archive instead of many files"
        )
    parts = split(read_escapes(text), ";", len(text))
    return tuple(_parse_part(text, part, end) for part, end in parts)


def parse_line(line: str) -> Directive:
    """Return the directive of one ``#STAGE`` line. Raise DirectiveError."""
    check_characters(line)
    words = split_words(line, len("#STAGE"), sbatch=False)
    if words and (found := _OPTION_OF_SBATCH.match(words[0].value)):
        raise DirectiveError(f"leave out {found[0]}: write {_LINE}", line, words[0].at)
    if len(words) < 2 or "=" in words[1].value.partition("/")[0]:
        raise _missing_path(line, words)
    _check_commas(line, words)
    _check_quotes(line, words)
    for path in words[:2]:
        if _OPTION_BEHIND.search(path.value):
            problem = f"write a space, not ',', before an option: {_LINE}"
            remedy = f"if the ',' is part of the path, use #SBATCH --stage instead: {_COMMA}"
            raise DirectiveError(f"{problem}; {remedy}", line, line.find(",", path.at))
    return _build(line, words[0], words[1], words[2:])


def _check_commas(line: str, words: Sequence[Field]) -> None:
    """Raise DirectiveError for a comma between two words, or at the end of the last one."""
    at = next((word.comma for word in words if word.comma >= 0), -1)
    if at >= 0:
        problem = f"write only a space, no ',', between SRC, DST and options: {_LINE}"
        remedy = "if a name or pattern ends in ',', put it in quotes"
        raise DirectiveError(f"{problem}; {remedy}", line, at)


def _check_quotes(line: str, words: Sequence[Field]) -> None:
    """Raise DirectiveError for a path whose blanks seem to be without quotes."""
    _, destination, *options = words
    others = [word for word in options if word.value.startswith("/")]
    is_relative = not destination.value.startswith("/") and not is_url(destination.value)
    if others and is_relative:
        others = [destination]
    if others:
        problem = 'a path with a space must be in quotes, as in #STAGE "/shared/my set" /nvme/x'
        raise DirectiveError(problem, line, others[0].at)


def _missing_path(line: str, words: Sequence[Field]) -> DirectiveError:
    end = len(line.rstrip())
    if not words:
        return DirectiveError(f"source and destination are missing: write {_LINE}", line, end)
    start = line.index("://", words[0].at) + 1 if is_url(words[0].value) else words[0].at
    colon = line.rfind(":", start, words[1].at if len(words) > 1 else end)
    if colon >= 0:
        problem = f"write a space, not ':', between source and destination: {_LINE}"
        return DirectiveError(problem, line, colon)
    return DirectiveError(f"the destination is missing: write {_LINE}", line, end)


def _parse_part(text: str, chars: list[Char], end: int) -> Directive:
    fields = split(chars, ",", end)
    (paths, paths_end), options = fields[0], fields[1:]
    source, destination = _split_paths(text, lstrip(paths), paths_end)
    if found := _OPTION_AFTER_SPACE.search(destination.value):
        problem = "write ',', not a space, before an option"
        raise DirectiveError(problem, text, text.find(found[0], destination.at))
    return _build(text, source, destination, [field(option, at) for option, at in options])


def _split_paths(text: str, paths: list[Char], end: int) -> tuple[Field, Field]:
    """Return source and destination, which one ``:`` separates."""
    if not paths:
        raise DirectiveError("source and destination are missing: write SRC:DST", text, end)
    start = "".join(c.char for c in paths)
    url = _IMAGE.match(start) or _URL.match(start)
    protected = url.end() if url else 0
    pieces = split(paths[protected:], ":", end)
    if len(pieces) == 1:
        problem = "no ':' between source and destination"
        if text[end:].lstrip(f",{BLANKS}").startswith("/"):
            problem += f" before ','; write each source as SRC:DST, joined by ';'; {_COMMA}"
        raise DirectiveError(problem, text, end)
    (source, source_end), (destination, destination_end) = pieces[:2]
    if len(pieces) > 2:
        rest = field([char for char in paths if char.at > source_end], end)
        if is_url(rest.value):
            raise DirectiveError(_NO_URL, text, rest.at)
        problem = "a second ':'; if it is part of a path, write \\: (in an #SBATCH line \\\\:)"
        raise DirectiveError(problem, text, destination_end)
    target = path_field(destination, destination_end)
    if target.value and is_blank(destination[-1]):
        problem = "a blank ends the destination; remove it, or write '\\ ' for one in the path"
        raise DirectiveError(problem, text, destination[-1].at)
    return path_field(paths[:protected] + source, source_end), target


def _build(text: str, source: Field, destination: Field, options: Sequence[Field]) -> Directive:
    for path, what in ((source, "source"), (destination, "destination")):
        _check_path(text, path, what)
        _check_expansions(text, path)
    chosen = _Chosen(text)
    for option in options:
        chosen.read(option)
    _check_format(text, source, chosen.values)
    for option in options:
        chosen.check_mode(option)
        chosen.check_decompress(option)
        chosen.check_layout(option, source.value)
    return Directive(source.value, destination.value, Options(**chosen.values))


def _check_format(text: str, source: Field, options: Mapping[str, Any]) -> None:
    """Raise DirectiveError for a source that the ``options`` cannot unpack, by its name."""
    if is_url_file(source.value):  # the URL's name is not known here
        return
    is_packed = not is_image(source.value)  # whatever its tag ends in
    if "extract" in options and not (is_packed and archive_suffix(source.value)):
        known = " ".join(ARCHIVES)
        raise DirectiveError(f"'extract' needs an archive as source: {known}", text, source.at)
    is_compressed = is_packed and compressed_suffix(source.value)
    if options.get("decompress") == ITSELF and not is_compressed:
        problem = (
            f"'decompress' needs a compressed file as source: {' '.join(COMPRESSIONS)}; for files "
            "in a folder write a pattern: decompress=*"
        )
        raise DirectiveError(problem, text, source.at)


def _check_path(text: str, path: Field, what: str) -> None:
    if not path.value:
        raise DirectiveError(f"the {what} is empty", text, path.at)
    if is_url(path.value):
        if what == "destination":
            raise DirectiveError(_NO_URL, text, path.at)
        _check_url(text, path)
        return
    if path.value[0] in "\"'":
        problem = f"the {what} begins with a quotation mark; remove the quotes, a blank needs none"
        raise DirectiveError(problem, text, path.at)
    if not path.value.startswith("/") and not (what == "source" and is_url_file(path.value)):
        problem = f"the {what} must be an absolute path ($VARIABLES and ~ are not expanded here)"
        raise DirectiveError(problem, text, path.at)
    if what == "destination" and ".." in path.value.split("/"):
        raise DirectiveError("'..' is not allowed in a destination", text, path.at)


def _check_expansions(text: str, path: Field) -> None:
    """Raise DirectiveError for what the user expects to be expanded; in URLs, ``%`` is common."""
    known = "$" if is_url(path.value) else _NOT_EXPANDED
    at = next((at for at in path.expansions if text[at] in known), None)
    if at is None:
        return
    char = text[at]
    literally = f"write \\{char} (in an #SBATCH line \\\\{char})"
    if text.startswith("#STAGE"):
        literally = "put it in single quotes"
    raise DirectiveError(f"{_NOT_EXPANDED[char]}; for a name with '{char}' {literally}", text, at)


def _check_url(text: str, url: Field) -> None:
    try:
        Location.parse(url.value)
    except ValueError as error:
        raise DirectiveError(f"the source {error}", text, url.at) from None


class _Chosen:
    """The options of one directive in ``text``; ``values`` are those of `Options` by name.

    How a value is read depends on the type of the option's default in `Options`, so that a new
    option is added there alone. An option that is a text is read by a function of its own.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.values: dict[str, Any] = {}

    def read(self, option: Field) -> None:
        """Add an option to ``values``. Raise DirectiveError."""
        key, equals, value = option.value.partition("=")
        kind = self._type(option, key)
        if kind is bool:
            if equals:
                raise self._fault(f"'{key}' takes no value", option.at + len(key))
            self.values[key] = True
            return
        if key == "decompress" and self._is_given_apart(equals):
            raise self._fault("'decompress' is given twice", option.at)
        if key == "decompress" and not equals:
            self.values[key] = ITSELF
            return
        if not equals:
            choices = " or ".join(kind) if issubclass(kind, StrEnum) else "…"
            raise self._fault(f"'{key}' needs a value: {key}={choices}", option.at)
        at = option.at + len(key) + len("=")
        if issubclass(kind, StrEnum):
            self.values[key] = self._choice(kind, value, at)
        elif kind is tuple:
            self.values[key] = (*self.values.get(key, ()), self._pattern(value, at))
        else:
            assert key == "by", f"no function reads the option {key}"
            self.values[key] = self._numbered_pattern(value, at)

    def _is_given_apart(self, equals: str) -> bool:
        """Whether decompress was given without a pattern, or is now, but not only."""
        before = self.values.get("decompress", ())
        return before == ITSELF or bool(before and not equals)

    def check_mode(self, option: Field) -> None:
        """Raise DirectiveError for an ``option`` that cannot be combined with the mode."""
        key = option.value.partition("=")[0]
        is_shard = self.values.get("mode") is Mode.SHARD
        if key == "by" and not is_shard:
            raise self._fault(f"'{key}' needs mode=shard", option.at)
        if is_shard and (key == "extract" or self.values.get(key) is Relocate.VENV):
            raise self._fault(f"'{key}' cannot be combined with mode=shard", option.at)

    def check_layout(self, option: Field, source: str) -> None:
        """Raise DirectiveError for an ``option`` that cannot be combined with layout=hub."""
        if self.values.get("layout") is not FolderLayout.HUB:
            return
        key = option.value.partition("=")[0]
        if key == "layout" and not source.startswith(f"{Scheme.HF}://"):
            raise self._fault("'layout=hub' needs a model of a hub as source: hf://…", option.at)
        others = {"mode": Mode.SHARD, "relocate": Relocate.VENV}
        if key == "decompress" or (key in others and self.values[key] == others[key]):
            raise self._fault(f"'{option.value}' cannot be combined with layout=hub", option.at)

    def check_decompress(self, option: Field) -> None:
        """Raise DirectiveError for an ``option`` that cannot be combined with decompress."""
        key = option.value.partition("=")[0]
        others = {"extract": True, "mode": Mode.SHARD, "relocate": Relocate.VENV}
        if "decompress" in self.values and key in others and self.values[key] == others[key]:
            raise self._fault(f"'{option.value}' cannot be combined with decompress", option.at)

    def _type(self, option: Field, key: str) -> type:
        """Return the type of the option's value. Raise DirectiveError unless it may be given."""
        kind = OPTION_TYPES.get(key)
        if not self._text.startswith("#STAGE"):
            self._check_joint(option)
        if kind is None:
            shown = printable(key)
            # The value of an option may stand alone: shard for mode=shard.
            near = [f"{name}={shown}" for name, kind in _CHOICES.items() if shown in kind]
            near += difflib.get_close_matches(shown, OPTION_TYPES)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(OPTION_TYPES)}"
            if self._text.startswith("#STAGE") and not near and "=" not in option.value:
                hint += "; a path with a space must be in quotes"
            raise self._fault(f"unknown option '{shown}'; {hint}", option.at)
        if key in self.values and kind is not tuple:
            raise self._fault(f"'{key}' is given twice", option.at)
        return kind

    def _check_joint(self, option: Field) -> None:
        """Raise DirectiveError for a comma without an option behind it in a ``--stage`` value."""
        if not option.value:
            raise self._fault("no option follows ','; write one, or remove ','", option.at)
        if option.value.startswith("/") or is_url(option.value):
            problem = f"write ';', not ',', before another SRC:DST, or repeat --stage; {_COMMA}"
            raise self._fault(problem, option.at)

    def _choice(self, choices: type[StrEnum], value: str, at: int) -> StrEnum:
        try:
            return choices(value)
        except ValueError:
            known = ", ".join(choices)
            raise self._fault(f"'{printable(value)}' is not one of {known}", at) from None

    def _pattern(self, value: str, at: int) -> str:
        from stager.tree.patterns import is_pattern  # which takes a while to import

        if not is_pattern(value):
            problem = f"'{printable(value)}' is not a valid pattern"
            remedy = "write it as in a .gitignore, but not with ! or # at its beginning"
            raise self._fault(f"{problem}; {remedy}", at)
        return value

    def _numbered_pattern(self, value: str, at: int) -> str:
        from stager.tree.patterns import NUMBER, is_numbered_pattern  # as slow

        if not is_numbered_pattern(value):
            raise self._fault(
                f"'{printable(value)}' is not a valid pattern; write {NUMBER} once, in place of "
                f"the number, and at most two * in each name, as in part-{NUMBER}.*",
                at,
            )
        return value

    def _fault(self, problem: str, at: int) -> DirectiveError:
        return DirectiveError(problem, self._text, at)
