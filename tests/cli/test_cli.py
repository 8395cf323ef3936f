"""What `stagectl` prints and how it ends, run as users and Slurm run it."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stager.cli import main
from stager.launch.answers import frames
from tests.support.stagectl import STAGECTL, Ran, environment, run
from tests.support.users import forked

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Beside the roots: one machine's ranks need no network, and without it they begin a second sooner.
SITE = '[launch.environment]\nOMPI_MCA_btl = "self,sm"\n'
#: Messages that more than one test expects.
NO_CONFIG = "is missing; tell the administrator (slurm-config/stage.toml is a template for it)"
OUTSIDE = (
    "not inside a Slurm job: use sbatch, salloc or srun first, "
    "or --local N to simulate N nodes on this machine"
)
MISSING = "No such file or directory; is the path right, and on a filesystem that the nodes see?"
TWICE = (
    "/nvme/b is the destination of two directives: from /a (validate=stat) and from /c "
    "(validate=stat); remove one of them, or change its destination"
)
NOT_BENEATH = (
    "/b is not beneath a folder that this site stages to; choose a destination beneath /nvme"
)


def call(
    arguments: list[str], folder: Path, variables: dict[str, str] | None = None, stdin: bytes = b""
) -> Ran:
    """The program in a fork of this process, which spares it the start of an interpreter."""
    inherited = variables or environment()
    with ExitStack() as stack:
        typed, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        typed.write(stdin)
        typed.seek(0)

        def act() -> int:
            for number, file in enumerate((typed, out, err)):
                os.dup2(file.fileno(), number)
            # As Python opens them under LC_ALL=C.UTF-8; they are flushed when the program ends.
            sys.stdin, sys.stdout, sys.stderr = (
                open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
                for number, mode in enumerate("rww")
            )
            os.environ.clear()
            os.environ.update(inherited)
            os.chdir(folder)
            sys.argv = ["stagectl", *arguments]
            with pytest.raises(SystemExit) as end:
                main.main()
            sys.stdout.flush()
            assert isinstance(end.value.code, int)
            return end.value.code

        code = forked(act)
        out.seek(0)
        err.seek(0)
        return Ran(code, out.read().decode(), err.read().decode())


class Desk:
    """A user's folder with a site's stage.toml, and what stagectl does from there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "stage.toml"
        self.config.write_text(f'roots = ["/nvme"]\n{SITE}')
        self.source = folder / "img.sqsh"
        self.source.write_bytes(b"image\n" * 50_000)
        self.nodes = folder / "nodes"

    def stagectl(
        self, command: str, *arguments: str | Path, stdin: str = "", **variables: str
    ) -> Ran:
        """``stagectl COMMAND --config stage.toml …``, in the user's folder."""
        line = [command, "--config", str(self.config), *map(str, arguments)]
        return call(line, self.folder, environment(**variables), stdin.encode())

    def local(self, command: str, *values: str) -> Ran:
        """The command on three simulated nodes, by ``python -m stager``; T and R for its times."""
        line = [command, "--config", self.config, "--local", "3", "--local-root", self.nodes]
        return untimed(run([*STAGECTL, *map(str, line), *values], self.folder))

    def copy(self, node: int, destination: str = "/nvme/img.sqsh") -> Path:
        """Where a simulated node has its copy."""
        return Path(f"{self.nodes}/node{node}{destination}")


def untimed(ran: Ran) -> Ran:
    """With T for each time and R for each rate, which no two runs share."""
    out = re.sub(r"\(\d[\d.]* [KMG]?i?B/s a node\)", "(R a node)", ran.out)
    return Ran(ran.code, re.sub(r"\d+\.\d s\b", "T", out), ran.err)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


# Help

#: The options that say which nodes are meant.
WHERE = """\
  -w, --nodes NODES  The nodes that are meant, such as n[1-4] or @group.
  --job ID           The nodes of this job are meant.  [x>=1]
  --local-root PATH  What `stage --local` keeps here is meant.
  --config PATH      The site's stage.toml.  [default: /etc/slurm/stage.toml]
  --json             Print JSON instead of text.
  -h, --help         Show this message and exit.
"""
HELP = {
    "": """\
Usage: stagectl [OPTIONS] COMMAND [ARGS]...

  Put files on the disks of every node of a Slurm job.

Options:
  --version   Show the version and exit.
  -h, --help  Show this message and exit.

Commands:
  bench   Measure the network, the disks and the source of this job's nodes.
  check   Check directives and batch scripts before submitting.
  demo    Show a stage of 256 MiB to simulated nodes.
  evict   Remove copies of yours.
  pack    Make one archive of a folder of many files, to be staged by...
  pin     Have the copies at DST stay until you unpin them.
  plan    Tell what `stage` would do, and do nothing.
  stage   Stage files to every node of this job's allocation.
  status  Show what is staged for you, and what room is left.
  unpin   Let the copies at DST go again when room is needed.
  verify  Read your copies again, and compare them with their digests.
""",
    "stage": """\
Usage: stagectl stage [OPTIONS] SRC:DST[,key=value]...

  Stage files to every node of this job's allocation.

  Inside a job of sbatch, salloc or srun; or on this machine alone, with
  --local.

Options:
  --local N          Simulate N nodes on this machine, each with a folder for
                     its disk.  [0<=x<=256]
  --local-root PATH  Where --local keeps the disks of the simulated nodes.
                     [default: ./stage-nodes]
  --config PATH      The site's stage.toml.  [default: /etc/slurm/stage.toml]
  --json             Print JSON instead of text.
  -v, --verbose      Tell also where the time went.
  -h, --help         Show this message and exit.
""",
    "bench": """\
Usage: stagectl bench [OPTIONS]

  Measure the network, the disks and the source of this job's nodes.

  Each by itself, in the way that a stage uses it. Nothing is published.

Options:
  --source TEXT      A file on shared storage, which one node reads.
  --root TEXT        Cache root to write beneath.  [default: the first]
  --size MIB         Most MiB of one message, and of the file that is written.
                     [default: 256; 1<=x<=16777216]
  --local N          Simulate N nodes on this machine, each with a folder for
                     its disk.  [0<=x<=256]
  --local-root PATH  Where --local keeps the disks of the simulated nodes.
                     [default: ./stage-nodes]
  --config PATH      The site's stage.toml.  [default: /etc/slurm/stage.toml]
  --json             Print JSON instead of text.
  -h, --help         Show this message and exit.
""",
    "check": """\
Usage: stagectl check [OPTIONS] [SRC:DST[,key=value]]...

  Check directives and batch scripts before submitting.

  Against the grammar, and against the site's stage.toml where there is one.

Options:
  --script PATH  A batch script, whose #STAGE and #SBATCH --stage lines are
                 checked.
  --config PATH  The site's stage.toml.  [default: /etc/slurm/stage.toml]
  --quiet        Say nothing of what is right.
  -h, --help     Show this message and exit.
""",
    "status": """\
Usage: stagectl status [OPTIONS]

  Show what is staged for you, and what room is left.

  On all nodes of the job that this runs in, else on this node, or on those
  that you name.

Options:
  --by [node|file|user]  One row for each of these; for root, --by user shows
                         the copies of all users.  [default: node]
  -w, --nodes NODES      The nodes that are meant, such as n[1-4] or @group.
  --job ID               The nodes of this job are meant.  [x>=1]
  --local-root PATH      What `stage --local` keeps here is meant.
  --config PATH          The site's stage.toml.  [default:
                         /etc/slurm/stage.toml]
  --json                 Print JSON instead of text.
  -h, --help             Show this message and exit.
""",
    "verify": f"""\
Usage: stagectl verify [OPTIONS] [DST]...

  Read your copies again, and compare them with their digests.

  All of them, or those at DST.

Options:
{WHERE}""",
    "evict": f"""\
Usage: stagectl evict [OPTIONS] [DST]...

  Remove copies of yours.

  Those at DST, or what --older or --to-free say. What a running job uses or
  what is pinned stays.

Options:
  --older TIME       What was not used for 90m, 12h or 7d.
  --to-free SIZE     The least recently used, until 200G or 1.5TiB are free on
                     each disk.
  --dry-run          Tell what would go, and do nothing.
{WHERE}""",
    "pin": f"""\
Usage: stagectl pin [OPTIONS] DST...

  Have the copies at DST stay until you unpin them.

Options:
{WHERE}""",
    "unpin": f"""\
Usage: stagectl unpin [OPTIONS] DST...

  Let the copies at DST go again when room is needed.

Options:
{WHERE}""",
}


@pytest.mark.parametrize(("command", "text"), HELP.items(), ids=lambda value: value[:6])
def test_help_is(command: str, text: str) -> None:
    assert run([*STAGECTL, *command.split(), "--help"]) == Ran(0, text, "")


@pytest.mark.parametrize(
    ("arguments", "usage"),
    [
        ([], "Usage: stagectl [OPTIONS] COMMAND [ARGS]...\n"),
        (["polish"], "Usage: stagectl [OPTIONS] COMMAND [ARGS]...\n"),
        (["stage"], "Usage: stagectl stage [OPTIONS] SRC:DST[,key=value]...\n"),
        (["stage", "--local", "-1", "/a:/b"],
         "Usage: stagectl stage [OPTIONS] SRC:DST[,key=value]...\n"),
        (["check", "--loud"], "Usage: stagectl check [OPTIONS] [SRC:DST[,key=value]]...\n"),
    ],
    ids=["no command", "an unknown command", "no value", "a bad number", "an unknown option"],
)  # fmt: skip
def test_a_wrong_command_line_ends_with_2_and_the_usage(arguments: list[str], usage: str) -> None:
    ran = run([*STAGECTL, *arguments])
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(usage)


# check

SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=4 --stage=/shared/c:/nvme/c
#STAGE "/shared/with blank" /nvme/ validate=size  # and a comment

# The head goes on over blank lines.
#SBATCH --stage "/shared/d:/nvme/d;/shared/e:/nvme/e"
#STAGED is another word
srun ./train
#STAGE /shared/too-late /nvme/too-late
"""
RIGHT: dict[str, tuple[list[str], list[str]]] = {
    "one": (["/a:/nvme/b"], ["/a to /nvme/b (validate=stat)"]),
    "with an option": (["/a:/nvme/b,validate=checksum"], ["/a to /nvme/b (validate=checksum)"]),
    "with the other option": (
        ["/a:/nvme/b,verify=readback"], ["/a to /nvme/b (validate=stat, verify=readback)"],
    ),
    "with an option's default": (["/a:/nvme/b,verify=stream"], ["/a to /nvme/b (validate=stat)"]),
    "several in one value": (
        ["/a:/nvme/b; /c:/nvme/d"], ["/a to /nvme/b (validate=stat)",
                                     "/c to /nvme/d (validate=stat)"],
    ),
    "several values": (
        ["/a:/nvme/b", "/c:/nvme/d"], ["/a to /nvme/b (validate=stat)",
                                       "/c to /nvme/d (validate=stat)"],
    ),
    "one twice": (["/a:/nvme/b", "/a:/nvme/b"], ["/a to /nvme/b (validate=stat)"]),
    "a folder's name": (["/x/a:/nvme/"], ["/x/a to /nvme/a (validate=stat)"]),
    "escapes": ([r"/a\:b:/nvme/c\,d\ "], ["/a:b to /nvme/c,d  (validate=stat)"]),
    "a script": (
        ["--script", "job.sh"],
        [
            "/shared/with blank to /nvme/with blank (validate=size)",
            "/shared/c to /nvme/c (validate=stat)",
            "/shared/d to /nvme/d (validate=stat)",
            "/shared/e to /nvme/e (validate=stat)",
        ],
    ),
    "a value and a script": (
        ["/a:/nvme/b", "--script", "short.sh"],
        ["/a to /nvme/b (validate=stat)", "/f to /nvme/f (validate=stat)"],
    ),
    "nothing": ([], ["nothing to stage"]),
    "a script without any": (["--script", "plain.sh"], ["nothing to stage"]),
}  # fmt: skip


@pytest.fixture
def scripts(desk: Desk) -> Desk:
    """A desk with batch scripts."""
    (desk.folder / "job.sh").write_text(SCRIPT)
    (desk.folder / "short.sh").write_text("#!/bin/sh\n#STAGE /f /nvme/f\n")
    (desk.folder / "plain.sh").write_text("#!/bin/sh\nsrun true\n")
    return desk


@pytest.mark.parametrize(("arguments", "lines"), RIGHT.values(), ids=RIGHT)
def test_check_repeats_what_is_right(scripts: Desk, arguments: list[str], lines: list[str]) -> None:
    text = "".join(f"stage: ok: {line}\n" for line in lines)
    assert scripts.stagectl("check", *arguments) == Ran(0, text, "")


def test_check_reads_a_script_from_stdin(desk: Desk) -> None:
    script = "#!/bin/sh\n#STAGE /f /nvme/f\n"
    text = "stage: ok: /f to /nvme/f (validate=stat)\n"
    assert desk.stagectl("check", "--script", "-", stdin=script) == Ran(0, text, "")


def test_a_quiet_check_says_nothing_of_what_is_right(scripts: Desk) -> None:
    assert scripts.stagectl("check", "--quiet", "--script", "job.sh") == Ran(0, "", "")


def test_check_without_stage_toml_checks_the_grammar_alone(desk: Desk) -> None:
    desk.config.unlink()
    assert desk.stagectl("check", "/a:/anywhere/b") == Ran(
        0,
        "stage: ok: /a to /anywhere/b (validate=stat)\n"
        f"stage: checked by the grammar alone: there is no {desk.config} here\n",
        "",
    )


def test_a_path_that_is_not_utf8_is_shown_with_escapes(desk: Desk) -> None:
    path = os.fsdecode(b"/caf\xe9")
    text = "stage: ok: /caf\\udce9 to /nvme/b (validate=stat)\n"
    assert desk.stagectl("check", f"{path}:/nvme/b") == Ran(0, text, "")


WRONG: dict[str, tuple[list[str], int, list[str]]] = {
    "no colon": (["/a"], 2, ["no ':' between source and destination", "  /a", "    ^"]),
    "an unknown option": (
        ["/a:/nvme/b,validat=size"], 2,
        ["unknown option 'validat'; did you mean 'validate'?",
         "  /a:/nvme/b,validat=size",
         "             ^"],
    ),
    "the second value": (
        ["/a:/nvme/b", "a:/nvme/c"], 2,
        ["the source must be an absolute path ($VARIABLES and ~ are not expanded here)",
         "  a:/nvme/c",
         "  ^"],
    ),
    "two sources for one destination": (["/a:/nvme/b", "/c:/nvme/b"], 2, [TWICE]),
    "two sources for one destination, here and in a script": (
        ["/a:/nvme/f,validate=size", "--script", "short.sh"], 2,
        [("/nvme/f is the destination of two directives: from /a (validate=size) and from /f "
          "(validate=stat); remove one of them, or change its destination")],
    ),
    "a place that the site does not stage to": (["/a:/b"], 3, [NOT_BENEATH]),
    "no such script": (
        ["--script", "none.sh"], 4,
        ["the batch script none.sh cannot be read: No such file or directory"],
    ),
    "a folder as script": (
        ["--script", "."], 4, ["the batch script . cannot be read: Is a directory"],
    ),
    "a line of a script": (
        ["--script", "wrong.sh"], 2,
        ["write a blank, not ':', between source and destination: #STAGE SRC DST [key=value…]",
         "  #STAGE /a:/nvme/b",
         "                   ^"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "code", "message"), WRONG.values(), ids=WRONG)
def test_check_explains_what_is_wrong(
    scripts: Desk, arguments: list[str], code: int, message: list[str]
) -> None:
    (scripts.folder / "wrong.sh").write_text("#!/bin/sh\n#STAGE /a:/nvme/b\n")
    text = "stage: " + "".join(f"{line}\n" for line in message)
    assert scripts.stagectl("check", *arguments) == Ran(code, "", text)


CONFIGS: dict[str, tuple[str, str]] = {
    "not TOML": ("roots = [", " is not TOML: Invalid value (at end of document)"),
    "an unknown key": ('roots = ["/nvme"]\nrots = 1', ": rots: unknown key"),
    "a wrong type": (
        'roots = ["/nvme"]\nlock_timeout = "soon"',
        ": lock_timeout: Input should be a valid number",
    ),
    "a variable that no program can have": (
        'roots = ["/nvme"]\n[launch.environment]\n"A=B" = "x"',
        ": launch.environment.A=B: this is not a possible name of an environment variable",
    ),
    "a variable with a null byte": (
        'roots = ["/nvme"]\n[launch.environment]\nA = "\\u0000"',
        ": launch.environment.A: must not contain a NUL character",
    ),
}


@pytest.mark.parametrize(("text", "problem"), CONFIGS.values(), ids=CONFIGS)
def test_a_broken_stage_toml_is_a_refusal(desk: Desk, text: str, problem: str) -> None:
    desk.config.write_text(text)
    assert desk.stagectl("check") == Ran(
        3, "", f"stage: {desk.config}{problem}; tell the administrator\n"
    )


@pytest.mark.parametrize(
    ("name", "problem"),
    [(".", "Is a directory"), ("x" * 256, "File name too long")],
    ids=["a folder", "a long name"],
)
def test_a_stage_toml_that_cannot_be_read_is_a_refusal(desk: Desk, name: str, problem: str) -> None:
    desk.config = desk.folder / name
    assert desk.stagectl("check") == Ran(
        3, "", f"stage: {desk.config} cannot be read: {problem}; tell the administrator\n"
    )


# Never a traceback

ROOT = Path("/")


def assert_explained(ran: Ran, *codes: int) -> None:
    """Either all is right and said on stdout, or the message is on stderr and nothing else."""
    assert ran.code in (0, *codes)
    if ran.code:
        assert ran.out == ""
        assert re.fullmatch(r"stage: \S(.|\n)*\n", ran.err)
    else:
        assert ran.err == ""
        assert ran.out.startswith("stage: ok: ")


#: All that an argument may hold: no null byte, and bytes that are no UTF-8 as Python has them.
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0") | st.sampled_from(
    [chr(code) for code in range(0xDC80, 0xDD00)]
)
VALUES = st.text(CHARACTERS) | st.lists(
    st.sampled_from(
        ["/a", "/nvme/b", ":", ",", ";", "\\", "=", "validate", "size", " ", "\t", "\n", "é",
         "\udcff", "..", "/", "http://h:1/", "x" * 200],
    )
).map("".join)  # fmt: skip
LINES = st.lists(
    st.sampled_from(
        [b"#STAGE ", b"#SBATCH --stage=", b"#SBATCH --stage ", b"/a /nvme/b", b"/a:/nvme/b",
         b" validate=", b"size", b'"', b"'", b"\\", b"\n", b"\r\n", b"#", b"\xff", b"\0", b";"],
    )
).map(b"".join)  # fmt: skip
TOML = st.lists(
    st.sampled_from(
        ["roots", "=", "[", "]", '"/nvme"', '"nvme/"', "launch", "transfer", ".", "\n", "chunk",
         "'4 MiB'", "-1", "nan", "inf", "1e999", "environment", "{}", "\\u0000", "é"],
    )
).map("".join)  # fmt: skip


@given(st.lists(VALUES, max_size=3))
@settings(database=None, deadline=None, max_examples=40)
def test_no_value_makes_a_traceback(values: list[str]) -> None:
    assert_explained(call(["check", "--config", "/nowhere", "--", *values], ROOT), 2)


@given(st.binary() | LINES)
@settings(database=None, deadline=None, max_examples=40)
def test_no_script_makes_a_traceback(script: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(script)
        file.flush()
        assert_explained(call(["check", "--config", "/nowhere", "--script", file.name], ROOT), 2)


@given(TOML.map(str.encode) | TOML.map('roots = ["/nvme"]\n'.__add__).map(str.encode) | st.binary())
@example(b"roots = " + b"9" * 5000)
@example(b"roots = " + b"[" * 5000)
@settings(database=None, deadline=None, max_examples=40)
def test_no_stage_toml_makes_a_traceback(text: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(text)
        file.flush()
        assert_explained(call(["check", "--config", file.name], ROOT), 3)


# Output that goes nowhere

OK = "stage: ok: /a to /nvme/b (validate=stat)\n"


def test_a_reader_that_has_left_the_pipe_is_no_failure_to_speak_of(desk: Desk) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*STAGECTL, "check", "--config", desk.config, "/a:/nvme/b"],
        stdout=writing, stderr=subprocess.PIPE, text=True, check=False, env=environment(),
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("closed", "out"),
    [("<&-", OK), (">&-", ""), ("2>&-", OK), ("<&- >&- 2>&-", "")],
    ids=["stdin", "stdout", "stderr", "all"],
)
def test_a_closed_stream_changes_nothing_but_that_it_is_not_written(
    desk: Desk, closed: str, out: str
) -> None:
    shell = ["/bin/sh", "-c", f'"$@" {closed}', "sh"]
    check = [*STAGECTL, "check", "--config", str(desk.config), "/a:/nvme/b"]
    assert run([*shell, *check]) == Ran(0, out, "")


def test_a_full_disk_for_the_output_is_said_on_stderr(desk: Desk) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*STAGECTL, "check", "--config", desk.config, "/a:/nvme/b"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment(),
        )  # fmt: skip
    assert done.stderr == "stage: the output cannot be written: No space left on device\n"
    assert done.returncode == 8


# Simulated nodes

STAGED = "stage: /nvme/img.sqsh: 293.0 KiB from {source} to {nodes} in T (R a node)"
ALL = "node[1-3] (3 nodes)"


def test_a_file_is_staged_once_and_then_to_the_nodes_that_lost_it(desk: Desk) -> None:
    value = f"{desk.source}:/nvme/img.sqsh"
    staged = STAGED.format(source=desk.source, nodes=ALL)
    assert desk.local("stage", value) == Ran(0, f"{staged}\n", "")
    inodes = [desk.copy(node).stat().st_ino for node in (1, 2, 3)]
    assert [desk.copy(node).read_bytes() for node in (1, 2, 3)] == [desk.source.read_bytes()] * 3

    skipped = f"stage: /nvme/img.sqsh: current on {ALL}, nothing moved (293.0 KiB, T)\n"
    assert desk.local("stage", value) == Ran(0, skipped, "")
    assert [desk.copy(node).stat().st_ino for node in (1, 2, 3)] == inodes

    desk.copy(2).unlink()
    restored = STAGED.format(source="the copy on node1", nodes="node2")
    text = f"{restored}; current on node[1,3] (2 nodes)\n"
    assert desk.local("stage", value) == Ran(0, text, "")
    assert desk.copy(2).read_bytes() == desk.source.read_bytes()
    assert [desk.copy(node).stat().st_ino for node in (1, 3)] == [inodes[0], inodes[2]]


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Desk, Ran]:
    """A desk with one file staged to three nodes, and what was printed as JSON."""
    desk = Desk(tmp_path_factory.mktemp("staged"))
    return desk, desk.local("stage", "--json", f"{desk.source}:/nvme/img.sqsh")


def test_json_has_what_was_done(staged: tuple[Desk, Ran]) -> None:
    desk, ran = staged
    done = json.loads(ran.out)
    seconds = [done.pop("seconds"), done["items"][0].pop("seconds")]
    assert all(isinstance(number, float) and 0 < number < 30 for number in seconds)
    assert sum(done.pop("phases").values()) == pytest.approx(seconds[0])
    assert done["items"][0].pop("peak_memory") > 1 << 20
    assert (ran.code, ran.err) == (0, "")
    assert done == {
        "items": [
            {
                "source": str(desk.source),
                "destination": "/nvme/img.sqsh",
                "size": 300_000,
                "received": ["node1", "node2", "node3"],
                "current": [],
                "senders": [],
                "digest": "534c4aa790cd6677008b36bda244561b",
                "source_bytes_read": 300_000,
                "reasons": ["absent"],
                "tree": None,
                "shard_list": "",
                "note": "",
            }
        ],
        "failures": [],
        "dry_run": False,
        "evicted": [],
        "code": 0,
    }


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """All that lies beneath ``folder``, with inode and mtime in nanoseconds."""
    return {
        str(path): ((facts := path.lstat()).st_ino, facts.st_mtime_ns) for path in folder.rglob("*")
    }


def test_a_plan_tells_what_would_move_and_changes_nothing(staged: tuple[Desk, Ran]) -> None:
    desk, _ = staged
    before = snapshot(desk.folder)
    ran = desk.local("plan", f"{desk.source}:/nvme/img.sqsh; {desk.source}:/nvme/a/b")
    assert ran == Ran(
        0,
        f"stage: /nvme/img.sqsh: current on {ALL}, nothing would move\n"
        f"stage: /nvme/a/b: 293.0 KiB would move from {desk.source} to {ALL} (absent)\n",
        "",
    )
    assert snapshot(desk.folder) == before


def test_a_plan_for_new_nodes_makes_nothing(desk: Desk) -> None:
    before = snapshot(desk.folder)
    ran = desk.local("plan", f"{desk.source}:/nvme/img.sqsh")
    assert ran == Ran(
        0,
        f"stage: /nvme/img.sqsh: 293.0 KiB would move from {desk.source} to {ALL} (absent)\n",
        "",
    )
    assert snapshot(desk.folder) == before


def test_a_missing_source_ends_with_4(desk: Desk) -> None:
    assert desk.local("stage", "/nowhere/img:/nvme/img") == Ran(
        4, "", f"stage: node1: /nowhere/img: {MISSING}\n"
    )
    assert [path for path in desk.nodes.glob("node*/nvme/*") if path.name[0] != "."] == []


@pytest.mark.parametrize(
    ("values", "code", "message"),
    [
        (["/a:/nvme/b", "/c:/nvme/b"], 2, TWICE),
        (["/a:/b"], 3, NOT_BENEATH),
        (["/a"], 2, "no ':' between source and destination\n  /a\n    ^"),
    ],
    ids=["two sources to one destination", "not the site's", "no directive"],
)  # fmt: skip
def test_a_request_that_makes_no_sense_ends_before_anything_is_made(
    desk: Desk, values: list[str], code: int, message: str
) -> None:
    assert desk.local("stage", *values) == Ran(code, "", f"stage: {message}\n")
    assert not desk.nodes.exists()


@pytest.mark.parametrize(
    ("root", "problem"),
    [("img.sqsh", "Not a directory"), ("/proc/nodes", "No such file or directory")],
)
def test_a_local_root_that_cannot_be_written_ends_with_2(
    desk: Desk, root: str, problem: str
) -> None:
    desk.nodes = desk.folder / root
    assert desk.local("stage", f"{desk.source}:/nvme/img") == Ran(
        2, "", f"stage: {desk.nodes}/node1/nvme: {problem}; choose another --local-root\n"
    )


# Where the time went, and what the nodes can do


def phases_of(line: str) -> list[str]:
    """The phases that the line names; they add up but for rounding, and the longest bounds."""
    found = re.fullmatch(r"stage: (\d+\.\d\d) s: (.*); bounded by (.*)", line)
    assert found
    told = [text.rpartition(" ") for text in found[2].split(", ")]
    seconds = {phase: float(number) for phase, _, number in told}
    assert sum(seconds.values()) == pytest.approx(float(found[1]), abs=0.005 * (len(told) + 1))
    assert seconds[found[3]] == max(seconds.values())
    return list(seconds)


def test_verbose_tells_where_the_time_went(job: Desk) -> None:
    copy = job.folder / "nvme/img.sqsh"
    ran = job.stagectl("stage", "-v", f"{job.source}:{copy}", **JOB)
    staged, times = ran.out.splitlines()
    assert (ran.code, ran.err) == (0, "")
    assert staged.startswith(f"stage: {copy}: 293.0 KiB from {job.source} to ")
    assert phases_of(times) == [
        "launch", "MPI init", "survey", "wait", "open", "read", "write", "broadcast", "fsync",
        "publish", "end",
    ]  # fmt: skip


def test_verbose_tells_where_the_time_of_a_failure_went(job: Desk) -> None:
    ran = job.stagectl("stage", "--verbose", f"/nowhere/img:{job.folder}/nvme/img", **JOB)
    message = f"stage: {socket.gethostname()}: /nowhere/img: {MISSING}\n"
    assert (ran.code, ran.err) == (4, message)
    first, second, *_, last = phases_of(ran.out.rstrip("\n"))
    assert (first, second, last) == ("launch", "MPI init", "end")


def test_bench_measures_and_leaves_no_file(desk: Desk) -> None:
    ran = desk.local("bench", "--size", "1", "--source", str(desk.source), "--json")
    rates: list[dict[str, Any]] = json.loads(ran.out)["rates"]
    assert (ran.code, ran.err) == (0, "")
    assert [(rate["what"], rate["size"], rate["algorithm"]) for rate in rates] == [
        ("write", 1 << 20, ""), ("read", 1 << 20, ""), ("source", 300_000, ""),
        *(
            ("wire", size, algorithm)
            for size in (1 << 16, 1 << 18, 1 << 20)
            for algorithm in ("bcast", "ibcast", "chain", "tree")
        ),
    ]  # fmt: skip
    assert all(0 < rate["seconds"] < 30 for rate in rates)
    assert {rate["node"] for rate in rates[:2]} <= {"node1", "node2", "node3"}
    assert {rate["node"] for rate in rates[2:3]} == {"node1"}
    assert [path for path in desk.nodes.rglob("*") if not path.is_dir()] == []


def test_bench_is_a_table_and_a_verdict(job: Desk) -> None:
    ran = job.stagectl("bench", "--size", "1", "--root", f"{job.folder}/nvme", **JOB)
    node = socket.gethostname()
    table = re.sub(r"\d+ us", "T us", re.sub(r"\d+\.\d\d GB/s", "R", ran.out))
    assert (ran.code, ran.err) == (0, "")
    lines = [re.sub(r" +", " ", line.strip()) for line in table.splitlines()]
    assert lines[:-1] == [
        "message best time bcast ibcast chain tree",
        "64.0 KiB T us R R R R",
        "256.0 KiB T us R R R R",
        "1.0 MiB T us R R R R",
        f"disk, written and synced, slowest on {node}: R",
        f"disk, read past its cache, slowest on {node}: R",
    ]
    assert lines[-1] in [f"a stage is bounded by the {part}: R a node" for part in ("disk", "wire")]


def test_bench_of_a_source_that_is_not_there_ends_with_4(desk: Desk) -> None:
    message = "stage: node1: /nowhere/img: No such file or directory\n"
    assert desk.local("bench", "--size", "1", "--source", "/nowhere/img") == Ran(4, "", message)
    ran = desk.local("bench", "--size", "1", "--source", "/nowhere/img", "--json")
    told = json.loads(ran.out)
    assert (ran.code, ran.err, told["code"], told["rates"]) == (4, "", 4, [])
    failure = {"code": 4, "message": "/nowhere/img: No such file or directory", "node": "node1"}
    assert told["failures"] == [failure]


def test_bench_outside_of_a_job_says_how_to_come_into_one(desk: Desk) -> None:
    assert desk.stagectl("bench") == Ran(2, "", f"stage: {OUTSIDE}\n")


@pytest.mark.parametrize(("site", "known"), [(True, "/nvme"), (False, "/")])
def test_bench_beneath_what_is_no_root_ends_with_3(desk: Desk, site: bool, known: str) -> None:
    if not site:
        desk.config.unlink()
    message = f"/b is not a folder that this site stages to; choose {known}"
    ran = desk.local("bench", "--root", "/b")
    assert ran == Ran(3, "", f"stage: {message}\n")
    assert not desk.nodes.exists()


# status


def without_room(text: str) -> str:
    """What a status says, but for the free space of this machine's disks; T for each age."""
    lines = [line for line in text.splitlines() if " free of " not in line]
    return "".join(f"{re.sub(r'[0-9]+ s ago', 'T ago', line)}\n" for line in lines)


def test_status_folds_the_records_of_all_nodes(staged: tuple[Desk, Ran]) -> None:
    desk, _ = staged
    ran = desk.stagectl("status", "--local-root", desk.nodes)
    assert (ran.code, ran.err) == (0, "")
    source = str(desk.source)
    assert re.sub(" +", " ", without_room(ran.out)) == (
        "NODE DST SIZE STAGED STATE KEPT SOURCE LAST JOB\n"
        f"node[1-3] /nvme/img.sqsh 293.0 KiB T ago current - {source} -\n"
        "1 file, 3 copies, 878.9 KiB in all\n"
    )
    assert re.search(r"^/nvme: [^\n]* free of [^\n]* on node\[1-3\]$", ran.out, re.MULTILINE)


def test_status_by_file_and_by_user(staged: tuple[Desk, Ran]) -> None:
    desk, _ = staged
    by_file = desk.stagectl("status", "--by", "file", "--local-root", desk.nodes)
    assert re.sub(" +", " ", without_room(by_file.out)) == (
        "DST SIZE NODES STATE KEPT SOURCE\n"
        f"/nvme/img.sqsh 293.0 KiB 3 3 current - {desk.source}\n"
        "1 file, 3 copies, 878.9 KiB in all\n"
    )
    by_user = desk.stagectl("status", "--by", "user", "--local-root", desk.nodes)
    user = pwd.getpwuid(os.getuid()).pw_name
    assert re.sub(" +", " ", without_room(by_user.out)) == (
        "USER FILES COPIES SIZE NODES\n"
        f"{user} 1 3 878.9 KiB node[1-3]\n"
        "1 file, 3 copies, 878.9 KiB in all\n"
    )


def test_status_as_json_has_the_entries_of_each_node(staged: tuple[Desk, Ran]) -> None:
    desk, _ = staged
    ran = desk.stagectl("status", "--json", "--local-root", desk.nodes)
    told = json.loads(ran.out)
    assert (ran.code, ran.err) == (0, "")
    assert list(told) == ["nodes", "missing"]
    for number, node in enumerate(told["nodes"], 1):
        assert list(node) == ["node", "state", "problem", "entries", "roots", "unreadable"]
        assert (node["node"], node["problem"], node["unreadable"]) == (f"node{number}", "", [])
        [entry] = node["entries"]
        assert (entry["state"], entry["size"]) == ("current", 300_000)
        assert entry["digest"] == "534c4aa790cd6677008b36bda244561b"
    assert len(told["nodes"]) == 3


def test_status_passes_over_files_beside_the_simulated_nodes(desk: Desk) -> None:
    desk.config.unlink()
    (desk.nodes / "node1").mkdir(parents=True)
    (desk.nodes / "nodes.txt").write_text("node1\n")
    ran = desk.stagectl("status", "--local-root", desk.nodes)
    assert without_room(ran.out) == "stage: nothing is staged for you beneath / on node1\n"


def test_status_folds_the_nodes_on_which_nothing_is_staged(desk: Desk) -> None:
    for number in (1, 2, 10):
        (desk.nodes / f"node{number}").mkdir(parents=True)
    text = "stage: nothing is staged for you beneath /nvme on node[1-2,10]\n"
    assert desk.stagectl("status", "--local-root", desk.nodes) == Ran(0, text, "")


def test_status_of_no_nodes_says_so(desk: Desk) -> None:
    text = "stage: nothing is staged for you beneath /nvme on any node\n"
    assert desk.stagectl("status", "--local-root", desk.nodes) == Ran(0, text, "")
    told = '{\n "nodes": [],\n "missing": {}\n}\n'
    assert desk.stagectl("status", "--json", "--local-root", desk.nodes) == Ran(0, told, "")


@pytest.mark.parametrize(
    ("variables", "node"),
    [
        ({"SLURMD_NODENAME": "n7"}, "n7"),
        ({}, socket.gethostname()),
        # A job of this node alone needs no step.
        (
            {"SLURMD_NODENAME": "n7", "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n7",
             "SLURM_JOB_NUM_NODES": "1"}, "n7",
        ),
    ],
    ids=["on a node", "outside", "in a job of one node"],
)  # fmt: skip
def test_status_of_a_node_without_records_says_so(
    desk: Desk, variables: dict[str, str], node: str
) -> None:
    (desk.folder / "nvme").mkdir()
    desk.config.write_text(f'roots = ["{desk.folder}/nvme", "{desk.folder}/none"]')
    ran = desk.stagectl("status", **variables)
    beneath = f"{desk.folder}/nvme or {desk.folder}/none"
    text = f"stage: nothing is staged for you beneath {beneath} on {node}\n"
    assert (ran.code, without_room(ran.out), ran.err) == (0, text, "")


def test_status_of_this_node_by_its_name_asks_nobody(desk: Desk) -> None:
    ran = desk.stagectl("status", "-w", "n7", SLURMD_NODENAME="n7")
    text = "stage: nothing is staged for you beneath /nvme on n7\n"
    assert (ran.code, without_room(ran.out), ran.err) == (0, text, "")


#: Plays srun and the plugin's helper on two nodes, whose disks are this one's; n3 is down.
NODES_SRUN = """\
#!/bin/bash
while [ "${1#-}" != "$1" ] || [ "${1%python*}" = "$1" ]; do shift; done
for node in n1 n2; do SLURMD_NODENAME=$node "$@"; done
"""
IN_JOB = {
    "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3",
    "SLURMD_NODENAME": "n1",
}  # fmt: skip


@pytest.fixture
def cluster(desk: Desk) -> Desk:
    """A desk in a job of three nodes, one of which is down."""
    programs = {"srun": NODES_SRUN, "sinfo": "#!/bin/sh\necho 'n1|drained'\necho 'n3|down*'\n"}
    for name, text in programs.items():
        (desk.folder / name).write_text(text)
        (desk.folder / name).chmod(0o755)
    (desk.folder / "nvme").mkdir()
    desk.config.write_text(
        f'roots = ["{desk.folder}/nvme"]\n[launch]\nsrun = "{desk.folder}/srun"\n'
    )
    return desk


def in_job(cluster: Desk, command: str, *arguments: str) -> Ran:
    path = f"{cluster.folder}:{os.environ['PATH']}"
    return cluster.stagectl(command, *arguments, **{**IN_JOB, "PATH": path})


@pytest.mark.parametrize("option", [[], ["--job", "17"], ["-w", "n[1-3]"]], ids=str)
def test_status_in_a_job_asks_its_nodes_and_says_which_do_not_answer(
    cluster: Desk, option: list[str]
) -> None:
    ran = in_job(cluster, "status", *option)
    assert (ran.code, ran.err) == (0, "")
    assert without_room(ran.out) == (
        f"stage: nothing is staged for you beneath {cluster.folder}/nvme on n[1-2]\n"
        "n3: down\nn1: drained\n"
    )


def test_a_status_that_nobody_answers_ends_with_8(cluster: Desk) -> None:
    (cluster.folder / "srun").write_text("#!/bin/sh\necho 'srun: no' >&2\nexit 1\n")
    assert in_job(cluster, "status") == Ran(8, "n[1-2]: srun: no\nn3: down\n", "")


def test_an_answer_of_another_version_is_told(cluster: Desk) -> None:
    lines = "".join(f"echo '{line}'\n" for line in frames("n1", {"shape": "other"}))
    (cluster.folder / "srun").write_text(f"#!/bin/sh\n{lines}")
    ran = in_job(cluster, "status", "-w", "n[1,3]")
    why = "its slurm-stage is of another version than this one"
    assert ran == Ran(8, f"n1: {why}\nn3: down\n", "")


def test_deeds_in_a_job_are_done_on_its_nodes(cluster: Desk) -> None:
    ran = in_job(cluster, "pin", "/nvme/a")
    message = "stage: n[1-2]: /nvme/a is not staged here\nstage: n3: down\n"
    assert ran == Ran(2, "", message)
    assert in_job(cluster, "verify") == Ran(8, "", "stage: n3: down\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-w", "n1", "--job", "3"],
         "--nodes, --job and --local-root exclude each other: choose one"),
        (["-w", "n[1-"], 'n[1- is not a list of nodes: missing bracket: "n[1-"'),
        (["-w", ","], ", is not a list of nodes: missing nodeset operand with ',' operator"),
    ],
    ids=["two at once", "a bad list", "a list of nothing"],
)  # fmt: skip
def test_nodes_that_make_no_sense_end_with_2(
    desk: Desk, arguments: list[str], message: str
) -> None:
    assert desk.stagectl("status", *arguments) == Ran(2, "", f"stage: {message}\n")


@pytest.mark.parametrize("order", ["", "x", "e30=", "\udce9"])
def test_a_node_refuses_what_is_no_order(desk: Desk, order: str) -> None:
    ran = run([*STAGECTL, "node", order])
    assert ran == Ran(2, "", "stage: this is for stagectl on another node to call\n")


def test_status_needs_the_sites_stage_toml(desk: Desk) -> None:
    desk.config.unlink()
    assert desk.stagectl("status") == Ran(3, "", f"stage: {desk.config} {NO_CONFIG}\n")


# verify, evict, pin, unpin


@pytest.fixture
def copies(desk: Desk) -> Desk:
    """A desk with one file staged to three nodes, for one test alone."""
    assert desk.local("stage", f"{desk.source}:/nvme/img.sqsh").code == 0
    return desk


def action(desk: Desk, command: str, *arguments: str) -> Ran:
    return desk.stagectl(command, "--local-root", desk.nodes, *arguments)


def test_copies_are_pinned_and_unpinned_on_all_nodes(copies: Desk) -> None:
    path, where = "/nvme/img.sqsh", "on node[1-3] (3 nodes)"
    assert action(copies, "pin", path) == Ran(0, f"stage: {path}: pinned {where}\n", "")
    assert " pinned " in action(copies, "status").out
    message = f"stage: node[1-3]: {path} is pinned; stagectl unpin it first\n"
    assert action(copies, "evict", path) == Ran(3, "", message)
    assert action(copies, "unpin", path) == Ran(0, f"stage: {path}: unpinned {where}\n", "")
    assert " pinned " not in action(copies, "status").out


def test_what_lacks_on_some_nodes_may_be_evicted_and_not_pinned(copies: Desk) -> None:
    path = "/nvme/img.sqsh"
    shutil.rmtree(copies.nodes / "node2/nvme/.slurm-stage")
    assert action(copies, "pin", path) == Ran(
        2, f"stage: {path}: pinned on node[1,3] (2 nodes)\n",
        f"stage: node2: {path} is not staged here\n",
    )  # fmt: skip
    assert action(copies, "unpin", path).code == 0
    assert action(copies, "evict", path) == Ran(
        0, f"stage: {path}: evicted on node[1,3] (2 nodes)\n", ""
    )
    assert action(copies, "evict", path) == Ran(
        2, "", f"stage: node[1-3]: {path} is not staged here\n"
    )


def test_evict_tells_what_would_go_and_then_what_went(copies: Desk) -> None:
    where = "on node[1-3] (3 nodes)"
    would = f"stage: /nvme/img.sqsh: would be evicted {where}\n"
    assert action(copies, "evict", "--dry-run", "/nvme//./img.sqsh") == Ran(0, would, "")
    nothing = "stage: nothing is there to be evicted\n"
    assert action(copies, "evict", "--older", "7d", "--dry-run") == Ran(0, nothing, "")
    time.sleep(1.1)
    # A second is the unit of what records remember of their use.
    went = f"stage: /nvme/img.sqsh: evicted {where}\n"
    assert action(copies, "evict", "--older", "1s") == Ran(0, went, "")
    assert not list(copies.nodes.rglob("img.sqsh"))
    assert action(copies, "evict", "--to-free", "1KiB") == Ran(0, nothing, "")


def test_what_is_pinned_stays_and_is_counted(copies: Desk) -> None:
    action(copies, "pin", "/nvme/img.sqsh")
    time.sleep(1.1)
    assert action(copies, "evict", "--older", "1s") == Ran(
        0, "stage: 1 copy stays on node[1-3] (3 nodes): pinned or in use\n"
        "stage: nothing is there to be evicted\n", "",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say what is to go: either DST, or --older TIME, or --to-free SIZE"),
        (["/nvme/a", "--older", "7d"],
         "say what is to go: either DST, or --older TIME, or --to-free SIZE"),
        *((["--older", text], f"--older {text}: say a time such as 90m, 12h or 7d")
          for text in ("7", "d", "0d", "-1d", "1.5h", "7 d", "1w", "9999999999d", "\u0667d")),
        *((["--to-free", text], f"--to-free {text}: say a size such as 200G or 1.5GiB")
          for text in ("G", "0", "-1G", "1X", "nan", "inf", "1e999G", "9" * 40)),
    ],
)  # fmt: skip
def test_what_evict_does_not_understand_ends_with_2(
    desk: Desk, arguments: list[str], message: str
) -> None:
    assert desk.stagectl("evict", *arguments) == Ran(2, "", f"stage: {message}\n")


def test_a_damaged_copy_ends_verify_with_7(copies: Desk) -> None:
    well = "stage: /nvme/img.sqsh: verified on node[1-3] (3 nodes)\n"
    assert action(copies, "verify") == Ran(0, well, "")
    copy = copies.copy(2)
    facts = copy.stat()
    with copy.open("r+b") as file:
        file.write(b"x")
    os.utime(copy, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    fault = "it is damaged: its bytes differ from its digest; evict it and stage it again"
    assert action(copies, "verify") == Ran(
        7, "stage: /nvme/img.sqsh: verified on node[1,3] (2 nodes)\n",
        f"stage: node2: /nvme/img.sqsh: {fault}\n",
    )  # fmt: skip
    ran = action(copies, "verify", "--json", "/nvme/img.sqsh")
    told = json.loads(ran.out)
    assert (ran.code, ran.err, told["code"], told["dry_run"]) == (7, "", 7, False)
    done = {"done": [{"destination": "/nvme/img.sqsh", "size": 300_000}], "refused": [], "stay": 0}
    refused = [{"code": 7, "message": f"/nvme/img.sqsh: {fault}", "absent": ""}]
    assert told["nodes"] == [
        {"node": "node1", "problem": "", **done},
        {"node": "node2", "problem": "", "done": [], "refused": refused, "stay": 0},
        {"node": "node3", "problem": "", **done},
    ]


# In a job

JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}


def test_stage_outside_of_a_job_says_how_to_come_into_one(desk: Desk) -> None:
    assert desk.stagectl("stage", "/a:/nvme/b") == Ran(2, "", f"stage: {OUTSIDE}\n")


def test_stage_in_a_job_needs_the_sites_stage_toml(desk: Desk) -> None:
    desk.config.unlink()
    ran = desk.stagectl("stage", "/a:/nvme/b", **JOB)
    assert ran == Ran(3, "", f"stage: {desk.config} {NO_CONFIG}\n")


def test_an_srun_that_is_not_there_ends_with_8(desk: Desk) -> None:
    desk.config.write_text('roots = ["/nvme"]\n[launch]\nsrun = "/nowhere/srun"')
    ran = desk.stagectl("stage", "/a:/nvme/b", **JOB)
    message = "/nowhere/srun cannot be started: No such file or directory"
    assert ran == Ran(8, "", f"stage: {message}\n")


#: An srun for jobs of one node, which is this one: a world of one rank needs no launcher.
SRUN = f"""#!/bin/sh
while [ "$1" != {sys.executable} ]; do shift; done
exec "$@"
"""
#: Such a rank has nobody to share memory with, and would leave its segment behind.
ALONE = '[launch.environment]\nOMPI_MCA_btl = "self"\n'


@pytest.fixture
def job(desk: Desk) -> Desk:
    """A desk in a job of one node, whose disk is a folder."""
    (desk.folder / "srun").write_text(SRUN)
    (desk.folder / "srun").chmod(0o755)
    (desk.folder / "nvme").mkdir()
    desk.config.write_text(
        f'roots = ["{desk.folder}/nvme"]\n[launch]\nsrun = "{desk.folder}/srun"\n{ALONE}'
    )
    return desk


def test_a_job_stages_by_its_srun_and_its_number_is_recorded(job: Desk) -> None:
    copy = job.folder / "nvme/img.sqsh"
    ran = untimed(job.stagectl("stage", f"{job.source}:{copy}", **JOB))
    node = socket.gethostname()
    text = f"stage: {copy}: 293.0 KiB from {job.source} to {node} in T (R a node)\n"
    assert ran == Ran(0, text, "")
    assert copy.read_bytes() == job.source.read_bytes()
    [record] = (job.folder / "nvme/.slurm-stage").glob("*/records/*")
    assert json.loads(record.read_text())["used_by_job"] == 17


def test_the_ranks_are_told_what_the_site_says_of_the_transfer(job: Desk) -> None:
    (job.folder / "srun").write_text('#!/bin/sh\necho "$STAGE_REQUEST"\n')
    with job.config.open("a") as config:
        config.write(
            '[transfer]\nchunk = "1MiB"\nmemory = "5MiB"\nalgorithm = "tree"\n'
            "readers = 3\nwriters = 2\ndirect = false\n"
        )
    ran = job.stagectl("stage", f"{job.source}:{job.folder}/nvme/img", **JOB)
    told = json.loads(ran.err.splitlines()[-1])
    assert (ran.code, told["transfer"]) == (
        8,
        {
            "chunk": 1 << 20, "depth": 5, "readers": 3, "writers": 2, "algorithm": "tree",
            "direct": False,
        },
    )  # fmt: skip


def test_a_job_without_a_home_stages_too(job: Desk) -> None:
    # Open MPI does not begin without HOME, and a job of sbatch --export=NIL has none.
    copy = job.folder / "nvme/img.sqsh"
    variables = environment(**JOB)
    del variables["HOME"]
    line = ["stage", "--config", str(job.config), f"{job.source}:{copy}"]
    ran = call(line, job.folder, variables)
    assert (ran.code, ran.err) == (0, "")
    assert copy.read_bytes() == job.source.read_bytes()


def test_a_file_whose_path_is_not_utf8_is_staged(job: Desk) -> None:
    source = job.source.rename(job.folder / os.fsdecode(b"caf\xe9"))
    ran = untimed(job.stagectl("stage", f"{source}:{job.folder}/nvme/", **JOB))
    text = (
        f"stage: {job.folder}/nvme/caf\\udce9: 293.0 KiB from {job.folder}/caf\\udce9 "
        f"to {socket.gethostname()} in T (R a node)\n"
    )
    assert ran == Ran(0, text, "")
    assert (job.folder / "nvme" / source.name).read_bytes() == source.read_bytes()


def test_a_failure_as_json_has_its_code_and_node(job: Desk) -> None:
    value = f"/nowhere/img:{job.folder}/nvme/img"
    ran = job.stagectl("stage", "--json", value, **JOB)
    done = json.loads(ran.out)
    node = socket.gethostname()
    assert sum(done.pop("phases").values()) == pytest.approx(done.pop("seconds"))
    assert (ran.code, ran.err) == (4, "")
    assert done == {
        "items": [],
        "failures": [{"code": 4, "message": f"/nowhere/img: {MISSING}", "node": node}],
        "dry_run": False,
        "evicted": [],
        "code": 4,
    }


def test_the_gate_stages_what_option_and_script_ask_for_in_task_prologs_language(
    job: Desk,
) -> None:
    first, second = job.folder / "nvme/first", job.folder / "nvme/second"
    (job.folder / "job.sh").write_text(f"#!/bin/sh\n#STAGE {job.source} {second}\n")
    variables = {**JOB, "STAGE_DIRECTIVES": f"{job.source}:{first}"}
    ran = untimed(job.stagectl("gate", "--task-prolog", "--script", "job.sh", **variables))
    node = socket.gethostname()
    assert ran == Ran(
        0,
        "".join(
            f"print stage: {copy}: 293.0 KiB from {job.source} to {node} in T (R a node)\n"
            for copy in (first, second)
        ),
        "",
    )
    assert first.read_bytes() == second.read_bytes() == job.source.read_bytes()


def test_the_gate_names_the_lists_of_what_is_spread_to_the_job(job: Desk) -> None:
    source = job.folder / "many"
    source.mkdir()
    (source / "file").write_bytes(b"12345")
    one, two = job.folder / "nvme/one", job.folder / "nvme/two"
    wishes = f"{source}:{one},mode=shard;{source}:{two},mode=shard"
    variables = {**JOB, "STAGE_DIRECTIVES": wishes}
    lists = f"export STAGE_SHARDS={one}/.stage-shards.tsv:{two}/.stage-shards.tsv"
    ran = job.stagectl("gate", "--task-prolog", **variables)
    assert (ran.code, ran.out.splitlines()[2:], ran.err) == (0, [lists], "")
    assert "STAGE_SHARDS" not in job.stagectl("gate", **variables).out
    assert (one / ".stage-shards.tsv").read_text() == f"{socket.gethostname()}\t5\tfile\n"


@pytest.mark.parametrize(
    ("directives", "variables", "code", "message"),
    [
        ("/a:/nvme/b", {}, 2, OUTSIDE),
        ("/a", JOB, 2, "no ':' between source and destination\n  /a\n    ^"),
        ("/a:/b", JOB, 3, NOT_BENEATH),
    ],
    ids=["outside of a job", "no directive", "not the site's"],
)  # fmt: skip
def test_a_gate_that_stays_closed_says_why_and_what_did_not_start(
    desk: Desk, directives: str, variables: dict[str, str], code: int, message: str
) -> None:
    given = {**variables, "STAGE_DIRECTIVES": directives}
    told = desk.stagectl("gate", **given)
    prolog = desk.stagectl("gate", "--task-prolog", **given)
    error = f"stage: {message}\nstage: the job's own program was not started (exit code {code})\n"
    assert told == Ran(code, "", error)
    printed = "".join(f"print {line}\n" for line in error.splitlines())
    assert prolog == Ran(code, printed, "")


# Signals


@contextmanager
def waiting(job: Desk) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A stagectl that waits for its srun, and the srun's process number."""
    (job.folder / "srun").write_text("#!/bin/sh\necho $$ >pid\nmv pid started\nexec sleep 60\n")
    with subprocess.Popen(
        [*STAGECTL, "stage", "--config", job.config, f"{job.source}:{job.folder}/nvme/img"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=job.folder, env=environment(**JOB),
    ) as process:  # fmt: skip
        try:
            started = job.folder / "started"
            for _ in range(500):
                if started.exists():
                    break
                time.sleep(0.01)
            yield process, int(started.read_text())
        finally:
            process.kill()


@pytest.mark.parametrize(
    # A terminal shows ^C, which wants a line of its own.
    ("number", "ended"), [(signal.SIGTERM, Ran(143, "", "")), (signal.SIGINT, Ran(130, "", "\n"))]
)  # fmt: skip
def test_a_signal_ends_the_launcher_and_then_this(job: Desk, number: int, ended: Ran) -> None:
    with waiting(job) as (process, launcher):
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    assert Ran(process.returncode, out, err) == ended
    assert not Path(f"/proc/{launcher}").exists()
