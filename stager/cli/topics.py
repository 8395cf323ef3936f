"""Say what ``stagectl help TOPIC`` explains: the reference, from where each thing is defined.

A text is plain, but for backticks around what is literal. ``packaging/reference`` makes pages of
the same sections, of which there are manual pages, too.
"""

from __future__ import annotations

from inspect import cleandoc
from typing import TYPE_CHECKING, NamedTuple

from stager.base.errors import exit_codes
from stager.base.options import CONFLICTS, DEFAULT_OPTIONS, WAYS
from stager.request.names import LETTERS, SPELLINGS
from stager.source.schemes import URLS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from stager.request.keys import Key
    from stager.source.schemes import Scheme


class Section(NamedTuple):
    """A part of a topic: a text, and behind it rows of a term and its meaning."""

    title: str
    text: str = ""
    rows: tuple[tuple[str, str], ...] = ()

    @property
    def paragraphs(self) -> list[str]:
        """The paragraphs of the text, each as one line."""
        parts = cleandoc(self.text).split("\n\n")
        return [" ".join(part.split()) for part in parts if part]


_REQUEST = """
    A directive asks for one file or folder. It stands after `--stage=` of sbatch, salloc and srun,
    after `#STAGE` and a blank in a batch script, and as an argument of `stagectl stage`. Options
    follow, each after a comma.

    `--stage` may be repeated. Those on the command line are added to those of the script. `;` joins
    directives in one value.

    `#STAGE` lines stand before the first command of the script, like `#SBATCH` lines. They need no
    quotes, and have no comments.
    """
_SRC = """
    A file or folder on storage that all nodes of the job share, or a URL that the site allows. A
    relative path begins where the job was submitted, `~/` in your home. `$NAME` is a variable of
    your environment there. A URL of `az:`, `s3:` or `gs:` that ends in `/` is the
    folder of all that lies beneath.
    """
_DST = """
    A path on each node's own disk, beneath a folder that the site allows. It begins with `/`, or
    with a variable of the site, such as `$SLURM_TMPDIR`; `stagectl site` names both. With a `/` at
    its end, the copy goes into that folder, under the source's name; without, exactly there.
    Missing folders are made.

    `shared:/PATH` is in a filesystem made of the disks of the job's nodes, where the site has one.
    `:shared:/PATH` makes an empty folder there.
    """
_NAMES = """
    These are filled in when the job starts, in SRC and DST. `%%` is a percent sign. For a variable
    that only the script knows, call `stagectl stage` there.
    """
_CHARACTERS = r"""
    `:` separates before `/` and `$`, `,` before the name of an option, and `;` always. A `\` before
    one of these, `$`, `%` or `\` makes it part of the path.

    On a command line, put the value in single quotes. In an `#SBATCH` line, write each `\` twice,
    and put a value with blanks in double quotes. So the path `/my set;1` is written
    `#STAGE /my set\;1:/nvme/alice/`, or `#SBATCH "--stage=/my set\\;1:/nvme/alice/"`.
    """
_OF_SLURM = {
    "--stage=VALUE": "directives, as above",
    "--stage-tolerate=N": "of sbatch: up to `N` nodes, or `N%` of them, may fail and leave the job",
    "-Q, --quiet": "on the command line: print failures alone",
}


def option_rows() -> Iterator[tuple[str, str]]:
    """Yield each way to write an option of a directive, and what it does."""
    for way, text in WAYS.items():
        name, _, value = way.partition("=")
        is_default = value and value == getattr(DEFAULT_OPTIONS, name, "")
        yield way, f"{text}; the default" if is_default else text


def _directives() -> Iterator[Section]:
    yield Section("SRC:DST[,option[=value]…]", _REQUEST)
    yield Section("SRC", _SRC, tuple((one.shape, one.meaning) for one in URLS))
    yield Section("DST", _DST)
    letters = ((_spellings(letter), meaning) for letter, meaning in LETTERS.items())
    yield Section("Names", _NAMES, tuple(letters))
    yield Section("Special characters", _CHARACTERS)
    yield Section("Options", rows=tuple(option_rows()))
    refused = (
        (name, ", ".join(f"`{one}`" for one in sorted(others)))
        for name, others in CONFLICTS.items()
    )
    yield Section("Options that exclude each other", rows=tuple(refused))
    yield Section("Options of Slurm's commands", rows=tuple(_OF_SLURM.items()))


def _spellings(letter: str) -> str:
    variables = [f"${name}" for name, other in SPELLINGS.items() if other == letter]
    return ", ".join([f"%{letter}", *variables])


_CODES = """
    A job whose stage fails ends with one of these codes, `FAILED 4:0` in sacct; so do an srun with
    `--stage` and the commands of `stagectl`. The message names the node and what to do.
    """


def _codes() -> Iterator[Section]:
    yield Section("", _CODES)
    for code, (title, remedy) in exit_codes().items():
        yield Section(f"Code {code}", f"{title}\n\n{remedy}")


_NODES = """
    `status`, `verify`, `evict`, `pin`, `unpin`, `doctor` and `prepare` act on all nodes of the job
    in which they run, also in the shell of salloc; elsewhere on this node. `stage`, `plan` and
    `bench` start processes on the nodes of a job.

    DST names a copy, or SRC one in the node's store. For root, `--job` goes over ssh, too. Without
    ssh, root runs `salloc -w NODES --overcommit stagectl COMMAND`.
    """
_OPTIONS_OF_NODES = {
    "--job ID": "the nodes of a running job of yours, by a step within it",
    "-w, --nodes NODES": "these nodes, over ssh: `n[1-4]`, or `@GROUP` of ClusterShell",
    "--hosts HOSTS": "without Slurm: these hosts, over ssh",
    "--hostfile FILE": "without Slurm: the hosts in this file of mpiexec, over ssh",
    "--launcher NAME": "the nodes of a job of this scheduler",
    "--local N": "simulated nodes on this machine, each with a folder as its disk",
    "--local-root PATH": "the folder of the simulated nodes",
}


def _nodes() -> Iterator[Section]:
    yield Section("", _NODES, tuple(_OPTIONS_OF_NODES.items()))


_SET = {
    "SBATCH_STAGE, SALLOC_STAGE": "one more `--stage` for each sbatch or salloc",
    "NO_COLOR": "no colours on a terminal",
}
_FOUND = {
    "STAGE_weights": "with `as=weights`, or another name: the path of that copy",
    "STAGE_SHARDS": "with `mode=shard`: the list of which node has which file, with node, bytes "
    "and path in a line and tabs between; of several folders, several lists joined by `:`",
    "STAGE_SHARED": "with `shared:`: the folder of that filesystem",
    "STAGE_FAILED_NODES": "the nodes that left the job by `--stage-tolerate`",
}
_STORES = """
    These reach the processes that stage, on all nodes of the job. They stand in no argument list,
    record or log. Files that they name must be readable on the nodes.
    """


def _environment() -> Iterator[Section]:
    yield Section("What you may set", rows=tuple(_SET.items()))
    yield Section("What a job's script finds", rows=tuple(_FOUND.items()))
    opened = ((f"{one}:", _opened_by(one)) for one in URLS if one.opener)
    yield Section("What opens stores", _STORES, tuple(opened))


def _opened_by(scheme: Scheme) -> str:
    names = () if scheme.is_web else (*scheme.credentials, *scheme.endpoints)
    return "; ".join(filter(None, (", ".join(f"`{name}`" for name in names), scheme.opener)))


_FILE = """
    The file is the same on all login and compute nodes, and all users can read it. Every key but
    `roots` stands here with its default. Sizes are a number of bytes, or text such as `"50GB"` or
    `"2MiB"`.

    An unknown key, or a value of the wrong form, is named when a job that stages is submitted or
    starts; that job ends with code 3.
    """


def _stage_toml() -> Iterator[Section]:
    from stager.request.keys import place_keys, tables  # the other topics need no pydantic

    yield Section("", _FILE)
    for table in tables():
        title = f"[{table.name}]" if table.name else "Keys before all tables"
        above = f"{table.name}." if table.name else ""
        yield Section(title, table.title, tuple(_row(above, key) for key in table.keys))
        if not table.name:
            yield Section("A table in roots", rows=tuple(_row("", key) for key in place_keys()))


def _row(above: str, key: Key) -> tuple[str, str]:
    term = f"{key.name} = {key.default}" if key.default else key.name
    return f"{above}{term}", " ".join(key.text)


#: What ``stagectl help`` explains besides commands: what it is, and how its sections are made.
TOPICS: Mapping[str, tuple[str, Callable[[], Iterator[Section]]]] = {
    "directives": ("How to ask for a file: SRC:DST and its options.", _directives),
    "codes": ("What the exit codes mean, and what to do.", _codes),
    "nodes": ("Which nodes and copies a command acts on.", _nodes),
    "environment": ("Variables that are read and set.", _environment),
    "stage.toml": ("The site's configuration.", _stage_toml),
}
