"""Answer a shell in which a user presses Tab.

``_STAGECTL_COMPLETE=bash_source stagectl`` prints a script for bash, also for zsh and fish. It has
the shell call stagectl with that variable in its environment. click then finds out what is to be
completed, and calls the functions here for the options and arguments that name one as
``shell_complete``, with the start of a word. They return whole words; what ends in ``/``, ``:`` or
``=`` is only the beginning of one. What goes wrong is told nobody.
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from itertools import islice
from string import ascii_uppercase
from typing import TYPE_CHECKING

from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    shell_complete,
    split_arg_string,
)

from stager.base.errors import StageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import click
    from click.shell_completion import CompletionItem

    from stager.request.lexer import Piece
    from stager.store.cache import Cache

#: Before an option whose name may not be there yet.
_LAST_OPTION = re.compile(r",(?=[A-Za-z_]*(?:[=,]|\Z))")
#: Seconds for reading records.
_RECORDS_LIMIT = 0.2
#: Nodes or files that are offered, and entries of a folder that are looked at.
_MOST_OFFERED, _MOST_ENTRIES = 1000, 20_000


def nodes(_: click.Context, __: click.Parameter, start: str) -> list[str]:
    """Return the nodes of the job, one more for a list such as ``n1,n2,``."""
    from stager.launch.job import unfold

    allocated = os.environ.get("SLURM_JOB_NODELIST")
    if not allocated:
        return []
    before, comma, last = start.rpartition(",")
    given = before.split(",")
    names = (name for name in unfold(allocated) if name not in given)
    found = (f"{before}{comma}{name}" for name in names if name.startswith(last))
    return list(islice(found, _MOST_OFFERED))


def copies(context: click.Context, parameter: click.Parameter, start: str) -> list[str]:
    """Return what names the user's copies on this node, or on the simulated nodes."""
    from stager.store.entries import shown

    given = context.params.get(parameter.name or "") or ()
    end = time.monotonic() + _RECORDS_LIMIT
    found: set[str] = set()
    for cache in _caches(context):
        for record in cache.records():
            found.add(shown(record))
            if time.monotonic() > end:
                break
    return sorted(
        path for path in found - {*given} if path.startswith(start) and path.isprintable()
    )


def _caches(context: click.Context) -> Iterator[Cache]:
    """Yield the caches that this user may change."""
    from stager.store.cache import look_for_cache

    config, simulated = context.params["config"], context.params.get("local_root")
    if simulated:
        from stager.launch.nodes import Scope
        from stager.request.policy import LOCAL, load_if_present

        disks = list(Scope.of_simulated(simulated).disks.values())
        places = [(root, False) for root in (load_if_present(config) or LOCAL).roots]
    else:
        from stager.base.rules import read_rules

        rules = read_rules(str(config))
        disks = [""]
        places = [(root, False) for root in rules.roots]
        if rules.shared_owner == os.getuid():
            places += [(root, True) for root in rules.shared_roots]
    for disk in disks:
        for root, shared in places:
            with suppress(StageError, OSError):  # this user never staged anything there
                yield look_for_cache(
                    f"{disk}{root.rstrip('/')}", os.getuid(), shared=shared, disk=disk
                )


def files(_: click.Context, __: click.Parameter, start: str) -> list[CompletionItem[str]]:
    """Have the shell itself complete the path of a file."""
    from click.shell_completion import CompletionItem  # only a shell needs it

    return [CompletionItem(start, type="file")]


def roots(context: click.Context, _: click.Parameter, start: str) -> list[str]:
    """Return the staging folders of this site."""
    from stager.base.rules import read_rules

    known = (root.rstrip("/") for root in read_rules(str(context.params["config"])).open_roots)
    return [root for root in known if root.startswith(start)]


def directives(context: click.Context, parameter: click.Parameter, start: str) -> list[str]:
    """Return ways to go on in ``SRC:DST[,option…]``, the last of several that ``;`` joins."""
    from stager.request.lexer import BLANKS, SEPARATOR, read, scheme_end, source_end

    last = read(start).split(SEPARATOR)[-1]
    last = last.behind(len(last.value) - len(last.value.lstrip(BLANKS)))
    found = source_end(last)
    if not found and not last.seen.endswith(":"):
        return [] if scheme_end(last) else _with_entries(start, last)
    # Behind the ':' of a URL may be a port or a tag, and a scheme goes on with '//'.
    if not found and (scheme_end(last) or "/" not in last.value):
        return []
    rest = last.behind(found.end() if found else len(last.value))
    fields = rest.split(_LAST_OPTION)
    if len(fields) > 1:
        return [f"{start[: fields[-1].at]}{option}" for option in _options(fields)]
    known = roots(context, parameter, "")
    return [f"{start[: rest.at]}{place}" for place in _destinations(rest.value, known)]


def _options(fields: list[Piece]) -> Iterator[str]:
    """Yield the options that may stand in the last of ``fields``, after those in the others."""
    from stager.base.options import OPTION_TYPES, WAYS

    given = {field.value.partition("=")[0] for field in fields[1:-1]}
    for way in WAYS:
        name, word = way.partition("=")[0], way.rstrip(ascii_uppercase)
        is_new = name not in given or OPTION_TYPES[name] is tuple
        if is_new and word.startswith(fields[-1].value):
            yield word


def _destinations(path: str, known: Iterable[str]) -> Iterator[str]:
    """Yield the folders where the site stages, or beneath one of them those that begin so."""
    from stager.request.lexer import escape

    folder, slash, _ = path.rpartition("/")
    for root in known:
        if path.startswith(f"{root}/"):
            found = (entry for entry in _entries(path) if entry.endswith("/"))
            yield from (f"{escape(folder + slash)}{entry}" for entry in found)
        elif f"{root}/".startswith(path):
            yield f"{escape(root)}/"


def _with_entries(start: str, source: Piece) -> list[str]:
    """Return ``start`` with each name that may be the end of its source."""
    name = source.behind(source.value.rfind("/") + 1)
    return [f"{start[: name.at]}{entry}" for entry in _entries(source.value)]


def _entries(path: str) -> list[str]:
    """Return what the last part of ``path`` may become; behind a file the destination follows."""
    from stager.request.lexer import escape

    folder, slash, start = path.rpartition("/")
    with os.scandir(os.path.expanduser(folder + slash) or ".") as entries:
        found = [
            (entry.name, "/" if entry.is_dir() else ":")
            for entry in islice(entries, _MOST_ENTRIES)
            if entry.name.startswith(start) and entry.name.isprintable()
        ]
    shown = [(name, end) for name, end in found if start or not name.startswith(".")]
    return [f"{escape(name)}{end}" for name, end in sorted(shown)[:_MOST_OFFERED]]


#: Seconds for an answer.
_LIMIT = 5.0
#: Characters that do not mean themselves in bash.
_SPECIAL = re.compile(r"[^\w@%+=:,./~-]")


def answer_shell(cli: click.Command, variable: str, instruction: str) -> int:
    """Do what a shell asks for by the value of ``variable``, and return the exit code.

    Who presses Tab gets words or nothing: no message, and no wait for storage that hangs.
    """
    for kind in (_Bash, _Fish, _Zsh):
        add_completion_class(kind)
    if instruction.endswith("_source"):
        return shell_complete(cli, {}, "stagectl", variable, instruction)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.setitimer(signal.ITIMER_REAL, _LIMIT)
    with suppress(Exception):
        return shell_complete(cli, {}, "stagectl", variable, instruction)
    return 1


class _WholeWords(ShellComplete):
    """Answers that begin with the option of ``--option=value``, which click leaves out."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        found = super().get_completions(args, incomplete)
        option, equals, _ = incomplete.partition("=")
        if equals and option.startswith("-"):
            for item in found:
                item.value = f"{option}={item.value}"
        return found


class _Bash(_WholeWords, BashComplete):
    """What bash asks and gets. It splits words at ``:`` and ``=``, so it sends the whole line."""

    source_template = """\
%(complete_func)s() {
	local type value
	COMPREPLY=()
	while IFS=, read -r type value; do
		case $type in
		file | dir) compopt -o default ;;
		plain)
			COMPREPLY+=("$value")
			[[ $value != *[/:=] ]] || compopt -o nospace
			;;
		esac
	done < <(env COMP_WORDS="${COMP_LINE:0:COMP_POINT}" COMP_CWORD="$2" \\
		%(complete_var)s=bash_complete "$1" 2>/dev/null)
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""
    #: What bash does not replace of the word, and whether an open quote precedes it.
    _kept, _quoted = "", False

    def get_completion_args(self) -> tuple[list[str], str]:
        line, replaced = os.environ["COMP_WORDS"], os.environ["COMP_CWORD"]
        # The letter makes a last word, even behind a blank.
        *words, last = split_arg_string(f"{line}x")
        start = last[:-1]
        self._quoted = line.removesuffix(replaced).endswith(("'", '"'))
        plain = replaced if self._quoted else "".join(split_arg_string(replaced))
        if start.endswith(plain):
            self._kept = start.removesuffix(plain)
        return words[1:], start

    def format_completion(self, item: CompletionItem[str]) -> str:
        value = item.value.removeprefix(self._kept)
        if not self._quoted:
            value = _SPECIAL.sub(lambda found: f"\\{found[0]}", value)
        return f"{item.type},{value}"


class _Zsh(_WholeWords, ZshComplete):
    """What zsh asks and gets, without a blank behind what is only the beginning of a word."""

    source_template = ZshComplete.source_template.replace(
        "compadd -U -V unsorted -a completions",
        "local -a begun=(${(M)completions:#*[/:=]}) whole=(${completions:#*[/:=]})\n"
        "        compadd -U -V unsorted -S '' -a begun\n"
        "        compadd -U -V unsorted -a whole",
    )


class _Fish(_WholeWords, FishComplete):
    """What fish asks and gets, where a word may have commas."""

    source_template = FishComplete.source_template.replace(
        'string split ","', 'string split --max 1 ","'
    )
