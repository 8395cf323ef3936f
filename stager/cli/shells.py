"""Answer a shell in which a user presses Tab.

``_STAGECTL_COMPLETE=bash_source stagectl`` prints a script for bash, also for zsh and fish. It has
the shell call stagectl with that variable in its environment. click then finds out what is to be
completed: a command, an option, or a value (`stager.cli.complete`).
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
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

if TYPE_CHECKING:
    import click

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
