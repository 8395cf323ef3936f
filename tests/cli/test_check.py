"""``stagectl check``: what it accepts, what it explains, and that nothing makes a traceback."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

# Imported here, since an ordinary user may be unable to read this Python.
import stager.cli.gate  # noqa: F401
from stager.cli import check
from tests.support.desk import NOT_BENEATH, TWICE, Desk, call
from tests.support.stagectl import Ran
from tests.support.users import as_ordinary_user, ordinary_home

SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=4 --stage=/shared/c:/nvme/c
#STAGE /shared/with blank:/nvme/,validate=always
# STAGE /shared/x /nvme/x

# The head goes on over blank lines.
#SBATCH --stage "/shared/d:/nvme/d;/shared/e:/nvme/e"
#STAGED is another word
srun ./train
#STAGE /shared/too-late:/nvme/too-late
"""
#: What is said of two lines.
IGNORED = (
    "stage: job.sh:4: warning: this is only a comment; to stage, write '#STAGE SRC:DST': "
    "# STAGE /shared/x /nvme/x\n"
    "stage: job.sh:10: warning: this is after the first command, so it is ignored: "
    "#STAGE /shared/too-late:/nvme/too-late\n"
)
NOTHING = "no #STAGE or #SBATCH --stage line before the first command"
LATE = "this is after the first command, so it is ignored"
REFUSED = "sbatch refuses this script:"
NO_INTERPRETER = f"{REFUSED} it does not begin with '#!' and the path of an interpreter"
WINDOWS = f"{REFUSED} this line ends in CR LF, as in Windows; convert the file with dos2unix"
PROGRAM = f"{REFUSED} this line has a null byte; name a batch script, not a program"
HASH = (
    "sbatch takes this '#' for the beginning of a comment; put the value in quotes, or write a "
    "space before a comment"
)
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
    "escapes": ([r"/a\:/b:/nvme/c\,d"], ["/a:/b to /nvme/c,d (validate=stat)"]),
    "a script": (
        ["--script", "job.sh"],
        [
            "/shared/c to /nvme/c (validate=stat)",
            "/shared/with blank to /nvme/with blank (validate=always)",
            "/shared/d to /nvme/d (validate=stat)",
            "/shared/e to /nvme/e (validate=stat)",
        ],
    ),
    "a value and a script": (
        ["/a:/nvme/b", "--script", "short.sh"],
        ["/a to /nvme/b (validate=stat)", "/f to /nvme/f (validate=stat)"],
    ),
    "a script without any": (["--script", "plain.sh"], [NOTHING]),
}  # fmt: skip


def unseen(source: str) -> str:
    """Return the warning of a source that does not exist."""
    return (
        f"stage: {source}: not seen from this machine (No such file or directory); check the path, "
        "and that the compute nodes mount this filesystem"
    )


def not_seen(*sources: str) -> str:
    """Return the warnings of sources that do not exist."""
    return "".join(f"{unseen(source)}\n" for source in sources)


@pytest.fixture
def scripts(desk: Desk) -> Desk:
    """A desk with batch scripts."""
    (desk.folder / "job.sh").write_text(SCRIPT)
    (desk.folder / "short.sh").write_text("#!/bin/sh\n#STAGE /f:/nvme/f\n")
    (desk.folder / "plain.sh").write_text("#!/bin/sh\nsrun true\n")
    return desk


@pytest.mark.parametrize(("arguments", "lines"), RIGHT.values(), ids=RIGHT)
def test_check_repeats_what_is_right(scripts: Desk, arguments: list[str], lines: list[str]) -> None:
    text = "".join(f"stage: ok: {line}\n" for line in lines)
    warned = not_seen(*dict.fromkeys(line.partition(" to ")[0] for line in lines))
    said = (IGNORED if "job.sh" in arguments else "") + ("" if NOTHING in lines else warned)
    assert scripts.stagectl("check", *arguments) == Ran(0, text, said)


def test_check_names_each_line_that_is_behind_the_first_command(desk: Desk) -> None:
    script = "#!/bin/sh\ncd\n#SBATCH -N2 --stage /f:/nvme/f\n#SBATCH -N4\n #STAGE\n#STAGE 'a\x1b\n"
    after = "warning: this is after the first command, so it is ignored"
    assert desk.stagectl("check", "--script", "-", stdin=script) == Ran(
        0,
        f"stage: ok: {NOTHING}\n",
        f"stage: -:3: {after}: #SBATCH -N2 --stage /f:/nvme/f\nstage: -:6: {after}: #STAGE 'a?\n",
    )


def test_check_reads_a_script_from_stdin(desk: Desk) -> None:
    script = "#!/bin/sh\n#STAGE /f:/nvme/f\n"
    text = "stage: ok: /f to /nvme/f (validate=stat)\n"
    assert desk.stagectl("check", "--script", "-", stdin=script) == Ran(0, text, not_seen("/f"))


@pytest.mark.parametrize("arguments", [[], ["--quiet"]])
def test_check_wants_to_know_what_to_check(desk: Desk, arguments: list[str]) -> None:
    ran = desk.stagectl("check", *arguments)
    problem = "Error: Name what to check: SRC:DST, or a batch script by --script FILE."
    assert (ran.code, ran.out, ran.err.splitlines()[-1]) == (2, "", problem)


def test_check_warns_of_a_source_that_cannot_be_read_here(desk: Desk) -> None:
    def act(home: Path) -> Ran:
        for name in ("closed", "open"):
            (home / name).touch(mode=0 if name == "closed" else 0o600)
        sources = (f"{home}/closed", f"{home}/open", f"{home}/none", "https://host/a")
        values = [f"{source}:/nvme/{at}" for at, source in enumerate(sources)]
        config = home / "stage.toml"
        config.write_text('roots = ["/nvme"]\n[source]\nallow = ["https://host"]\n')
        assert call(["check", "--quiet", "--config", str(config), *values], home) == Ran(0, "", "")
        return call(["check", "--config", str(config), *values], home)

    with ordinary_home() as home:
        ran = as_ordinary_user(lambda: act(home))
    denied = (
        f"stage: {home}/closed: not seen from this machine (Permission denied); you may not read "
        "it; ask its owner\n"
    )
    assert (ran.code, ran.err) == (0, denied + not_seen(f"{home}/none"))


def test_at_submission_check_warns_of_what_is_missing_in_a_folder_that_is_seen() -> None:
    def act(home: Path) -> Ran:
        (home / "file").touch()
        (home / "stage.toml").write_text('roots = ["/nvme"]\n[source]\nallow = ["s3://bucket"]\n')
        sources = ("none", "some/", "*.bin", "run?/data", "file", "none/at/all", "file/none")
        values = [f"{home}/{source}:/nvme/{at}/" for at, source in enumerate(sources)]
        arguments = ["--quiet", "--submits", "--config", f"{home}/stage.toml", *values]
        return call(["check", *arguments, "s3://bucket/*:/nvme/"], home)

    with ordinary_home() as home:
        ran = as_ordinary_user(lambda: act(home))
        there = "check the path: it must be there when the job starts"
        patterns = f"patterns are not expanded: stage {home} with the option include="
        hints = {"none": there, "some": there, "*.bin": f"{patterns}*.bin",
                 "run?/data": f"{patterns}run?/data"}  # fmt: skip
        lines = (
            f"stage: warning: {home}/{path}: not seen from this machine; {hint}\n"
            for path, hint in hints.items()
        )
        assert ran == Ran(0, "", "".join(lines))
        if os.getuid() == 0:  # it looks at no path
            assert act(home) == Ran(0, "", "")


def test_a_quiet_check_prints_nothing_if_all_is_right(scripts: Desk) -> None:
    assert scripts.stagectl("check", "--quiet", "--script", "short.sh") == Ran(0, "", "")


@pytest.mark.parametrize(
    ("value", "code", "said"),
    [
        ("1", 0, ""),
        ("50%", 0, ""),
        ("51%", 0, ""),  # then no more than the site allows may fail
        (
            "many", 2,
            ("stage: --stage-tolerate=many: write a number of nodes, or a share of the job's nodes "
            "such as 10%\n"),
        ),
    ],
)  # fmt: skip
def test_check_knows_how_many_nodes_may_fail(desk: Desk, value: str, code: int, said: str) -> None:
    line = ("check", "--quiet", "--stage-tolerate", value)
    assert desk.stagectl(*line, "--") == Ran(code, "", said)
    assert desk.stagectl(*line, "--", "/a:/nvme/b") == Ran(code, "", said)


def test_check_reads_how_many_nodes_may_fail_and_finds_misspelled_options(desk: Desk) -> None:
    script = """\
#!/bin/sh
#SBATCH --stage-tolerate=half
#SBATCH --stage-tolerate=10% --stage
#SBATCH -N2 --stages=/a:/nvme/b
#STAGES /a:/nvme/b
"""
    assert desk.stagectl("check", "--script", "-", stdin=script) == Ran(
        2,
        "",
        """\
stage: -:4: warning: this option is misspelled; to stage, write '#SBATCH --stage=SRC:DST': \
#SBATCH -N2 --stages=/a:/nvme/b
stage: -:5: warning: this is only a comment; to stage, write '#STAGE SRC:DST': #STAGES /a:/nvme/b
stage: -:2: --stage-tolerate=half: write a number of nodes, or a share of the job's nodes such \
as 10%
stage: -:3: --stage has no value
  #SBATCH --stage-tolerate=10% --stage
                               ^
""",
    )


def test_check_ends_a_line_of_a_script_where_sbatch_does(desk: Desk) -> None:
    script = "#!/bin/sh\n# one line\rdate\n#STAGE /f:/nvme/f\n"
    text = "stage: ok: /f to /nvme/f (validate=stat)\n"
    assert desk.stagectl("check", "--script", "-", stdin=script) == Ran(0, text, not_seen("/f"))


def test_a_file_without_a_colon_is_taken_for_a_script_by_mistake(scripts: Desk) -> None:
    message = "job.sh is a file; to check a batch script, write --script job.sh; to check a "
    assert scripts.stagectl("check", "job.sh") == Ran(
        2, "", f"stage: {message}directive, SRC:DST\n"
    )
    plain = "stage: no ':' between source and destination: write SRC:DST\n  job.sh\n        ^\n"
    assert scripts.stagectl("check", "--quiet", "job.sh") == Ran(2, "", plain)


def test_source_and_destination_as_two_arguments_are_told_to_be_one(desk: Desk) -> None:
    message = "stage: write source and destination as one argument: '/shared/my a:/nvme/b'\n"
    assert desk.stagectl("check", "/shared/my a", "/nvme/b") == Ran(2, "", message)


def test_a_quiet_check_names_lines_that_are_ignored(scripts: Desk) -> None:
    assert scripts.stagectl("check", "--quiet", "--script", "job.sh") == Ran(0, "", IGNORED)


def test_check_without_stage_toml_checks_only_the_syntax(desk: Desk) -> None:
    desk.config.unlink()
    assert desk.stagectl("check", "/a:/anywhere/b") == Ran(
        0,
        "stage: ok: /a to /anywhere/b (validate=stat)\n"
        f"stage: only the syntax was checked: there is no {desk.config} here\n",
        not_seen("/a"),
    )


def test_check_without_stage_toml_knows_no_rules_of_a_site(desk: Desk) -> None:
    desk.config.unlink()
    unchecked = f"stage: only the syntax was checked: there is no {desk.config} here\n"
    values = (
        "s3://b/k:/nvme/k",
        "http://h/f:/nvme/f",
        "hf://o/m:/nvme/m",
        "docker://r.org/n:1:/nvme/n",
    )
    assert desk.stagectl("check", "--quiet", "--stage-tolerate", "80%", *values) == Ran(0, "", "")
    ran = desk.stagectl("check", *values)
    assert (ran.code, ran.out.count("stage: ok: "), ran.out.endswith(unchecked)) == (0, 4, True)


def test_a_url_in_a_file_is_checked_and_shown_without_its_secret(desk: Desk) -> None:
    desk.config.unlink()
    file = desk.folder / "url"
    file.write_text("https://me:word@host/set.tar?sig=5ec2e7\n")
    file.chmod(0o600)
    assert desk.stagectl("check", f"@{file}:/nvme/,extract") == Ran(
        0,
        "stage: ok: https://host/set.tar to /nvme/set (validate=stat, extract)\n"
        f"stage: only the syntax was checked: there is no {desk.config} here\n",
        "",
    )
    file.chmod(0o644)
    told = f"stage: {file}: others may use it; have it your own, by chmod 600\n"
    assert desk.stagectl("check", f"@{file}:/nvme/x") == Ran(4, "", told)


@pytest.mark.parametrize("given", ["no JSON", "[1]"])
def test_secrets_that_the_environment_has_already_are_none(desk: Desk, given: str) -> None:
    nodes = ["--local", "3", "--local-root", str(desk.nodes)]
    ran = desk.stagectl("stage", *nodes, "@/none/url:/nvme/x", STAGE_URL_SECRETS=given)
    problem = "No such file or directory; check the path, and that this node mounts its filesystem"
    assert ran == Ran(4, "", f"stage: /none/url: {problem}\n")


def test_more_secrets_in_urls_than_a_job_may_have_are_told(desk: Desk) -> None:
    desk.config.unlink()
    values = []
    for at in range(9):
        file = desk.folder / f"{at}"
        file.write_text(f"https://host/{at}?{'s' * 16_000}\n")
        file.chmod(0o600)
        values.append(f"@{file}:/nvme/{at}")
    assert desk.stagectl("check", "--quiet", *values[:8]) == Ran(0, "", "")
    ran = desk.stagectl("check", "--quiet", *values)
    assert (ran.code, ran.err.rpartition("; ")[2]) == (2, "stage fewer of them in one job\n")


def test_at_submission_the_file_of_a_url_may_be_seen_by_the_job_alone(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there and wrong is refused; a filesystem without an answer is left, once for all."""
    desk.config.unlink()
    none, wrong = desk.folder / "none", desk.folder / "wrong"
    remedy = "check the path, and that this node mounts its filesystem"
    absent = f"{none}: No such file or directory; {remedy}\n"
    arguments = ["--quiet", f"@{none}:/nvme/a"]
    assert desk.stagectl("check", *arguments) == Ran(4, "", f"stage: {absent}")
    assert desk.stagectl("check", "--submits", *arguments) == Ran(
        0, "", f"stage: warning: {absent}"
    )
    wrong.write_text("no URL\n")
    wrong.chmod(0o600)
    told = f"stage: {wrong}: it has no URL; write one https://HOST/PATH, on one line alone\n"
    for value in ("@{}:/nvme/b", "@{}/none:/nvme/b"):
        ran = desk.stagectl("check", "--submits", *arguments, value.format(wrong))
        beneath = f"stage: warning: {wrong}/none: Not a directory; {remedy}\n"
        said = f"stage: warning: {absent}{beneath if 'none' in value else told}"
        assert ran == Ran(0 if "none" in value else 4, "", said)

    def wait(path: str) -> str:
        time.sleep(600)
        return path

    monkeypatch.setattr(check, "content", wait)
    begun = time.monotonic()
    ran = desk.stagectl("check", "--submits", *arguments, *(f"@/{at}:/nvme/{at}" for at in "bcde"))
    late = f"no answer for 2 s; {remedy}"
    lines = [f"stage: warning: {path}: {late}" for path in (none, "/b", "/c", "/d", "/e")]
    assert (ran.code, ran.out, ran.err.splitlines()) == (0, "", lines)
    assert time.monotonic() - begun < 60


def test_a_path_that_is_not_utf8_is_shown_with_escapes(desk: Desk) -> None:
    path = os.fsdecode(b"/caf\xe9")
    text = "stage: ok: /caf\\xe9 to /nvme/b (validate=stat)\n"
    assert desk.stagectl("check", f"{path}:/nvme/b") == Ran(0, text, not_seen("/caf\\xe9"))


WRONG: dict[str, tuple[list[str], int, list[str]]] = {
    "no colon": (
        ["/a"], 2, ["no ':' between source and destination: write SRC:DST", "  /a", "    ^"],
    ),
    "an unknown option": (
        ["/a:/nvme/b,validat=size"], 2,
        [("unknown option 'validat'; did you mean 'validate'? If not, write \\, where it is part "
          "of a path (in an #SBATCH line \\\\,)"),
         "  /a:/nvme/b,validat=size",
         "             ^"],
    ),
    "the second value": (
        ["/a:/nvme/b", "/a:/nvme/../c"], 2,
        ["'..' is not allowed in a destination",
         "  /a:/nvme/../c",
         "     ^",
         unseen("/a")],
    ),
    "two sources for one destination": (
        ["/a:/nvme/b", "/c:/nvme/b"], 2, [TWICE, unseen("/a"), unseen("/c")],
    ),
    "two sources for one destination, here and in a script": (
        ["/a:/nvme/f,validate=always", "--script", "short.sh"], 2,
        [("short.sh:2: /nvme/f is the destination of two directives: from /a (validate=always) and "
          "from /f (validate=stat); remove one of them, or change its destination"),
         unseen("/a"), unseen("/f")],
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
        ["wrong.sh:2: no ':' between source and destination: write #STAGE SRC:DST[,key=value…]",
         "  #STAGE /a /nvme/b",
         "                   ^"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", ["check", "gate"])
def test_a_script_that_the_user_may_not_read_is_a_source_error(command: str) -> None:
    def act(home: Path) -> Ran:
        script = home / "job.sh"
        script.write_text(SCRIPT)
        script.chmod(0)
        return call([command, "--config", str(home), "--script", str(script)], home)

    with ordinary_home() as home:
        ran = as_ordinary_user(lambda: act(home))
    first, *_ = ran.err.splitlines()
    assert first == f"stage: the batch script {home}/job.sh cannot be read: Permission denied"
    assert (ran.code, ran.out) == (4, "")


@pytest.mark.parametrize(("arguments", "code", "message"), WRONG.values(), ids=WRONG)
def test_check_explains_what_is_wrong(
    scripts: Desk, arguments: list[str], code: int, message: list[str]
) -> None:
    (scripts.folder / "wrong.sh").write_text("#!/bin/sh\n#STAGE /a /nvme/b\n")
    text = "stage: " + "".join(f"{line}\n" for line in message)
    assert scripts.stagectl("check", *arguments) == Ran(code, "", text)


def test_check_names_the_line_of_each_mistake(desk: Desk) -> None:
    script = """\
#STAGE /a:/b
#SBATCH --stage=/a/my set:/nvme/a
#STAGE /a /nvme/b
#SBATCH --stage='/a:/nvme/c
#STAGE /c:/nvme/c
#SBATCH --stage=/d:/nvme/c,validate=always
#SBATCH --stage=/d:/nvme/d and more -N2
"""
    (desk.folder / "wrong.sh").write_text(script, newline="\r\n")
    blank = "a blank ends the value of --stage before"
    assert desk.stagectl("check", "--script", "wrong.sh", "x:nvme/x") == Ran(
        2,
        "",
        f"""\
stage: wrong.sh:2: warning: {blank} 'set:/nvme/a'; put the value in quotes
stage: wrong.sh:7: warning: {blank} 'and'; put the value in quotes
stage: the destination must begin with '/' or a variable of the site, right behind ':': \
write SRC:DST
  x:nvme/x
    ^
stage: wrong.sh:1: {NO_INTERPRETER}
stage: wrong.sh:1: {WINDOWS}
stage: wrong.sh:1: {NOT_BENEATH}
stage: wrong.sh:2: no ':' between source and destination: write SRC:DST
  /a/my
       ^
stage: wrong.sh:3: no ':' between source and destination: write #STAGE SRC:DST[,key=value…]
  #STAGE /a /nvme/b
                   ^
stage: wrong.sh:4: the closing ' is missing
  #SBATCH --stage='/a:/nvme/c
                             ^
stage: wrong.sh:6: /nvme/c is the destination of two directives: from /c (validate=stat) and from \
/d (validate=always); remove one of them, or change its destination
"""
        + not_seen("/c", "/d"),
    )


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("", f"stage: -:1: {REFUSED} it is empty\n"),
        ("date\n", f"stage: -:1: {NO_INTERPRETER}\n"),
        ("\x7fELF\0\0\n\0", f"stage: -:1: {PROGRAM}\n"),
        ("#!/bin/sh\n#STAGE /a:/nvme/a\ndate\r\n", f"stage: -:3: {WINDOWS}\n"),
        (
            "#!/bin/sh\ndate\r\n#SBATCH --stage-tolerate=1\n",
            f"stage: -:3: warning: {LATE}: #SBATCH --stage-tolerate=1\nstage: -:2: {WINDOWS}\n",
        ),
        (
            "#!/bin/sh\n#SBATCH --stage=/a:/nvme/h#1\n",
            f"stage: -:2: {HASH}\n  #SBATCH --stage=/a:/nvme/h#1\n{'^':>29}\n",
        ),
    ],
    ids=["empty", "no interpreter", "a program", "Windows", "a warning, too", "a hash"],
)
def test_check_refuses_what_sbatch_refuses_or_cuts(desk: Desk, script: str, said: str) -> None:
    for quiet in ([], ["--quiet"]):
        warned = not_seen("/a") if "#STAGE /a:" in script and not quiet else ""
        ran = desk.stagectl("check", *quiet, "--script", "-", stdin=script)
        assert ran == Ran(2, "", said + warned)


def test_check_ends_with_the_code_of_a_refusal_by_the_site(desk: Desk) -> None:
    (desk.folder / "two.sh").write_text("#!/bin/sh\n#STAGE /a:/b\n#STAGE /c:/b\n")
    assert desk.stagectl("check", "--quiet", "--script", "two.sh") == Ran(
        3, "", f"stage: two.sh:2: {NOT_BENEATH}\nstage: two.sh:3: {NOT_BENEATH}\n"
    )


def test_check_knows_a_variable_that_a_shell_has_replaced(desk: Desk) -> None:
    desk.config.write_text('roots = ["/nvme"]\n[variables]\nSLURM_TMPDIR = "/nvme/%U.%j.%r"\n')
    ran = desk.stagectl("check", "/usr:$SLURM_TMPDIR/a", "$LATER/%j:/nvme/%a")
    assert ran == Ran(
        0,
        f"stage: ok: /usr to /nvme/{os.getuid()}.%j.%r/a (validate=stat)\n"
        f"stage: ok: {desk.folder}/$LATER/%j to /nvme/%a (validate=stat)\n",
        "stage: warning: LATER is not set here; the job fails unless its environment has it\n",
    )
    quotes = "put the value in single quotes"
    for place, hint in (
        ("/tmp/17", f"/tmp/17 is what $SLURM_TMPDIR is here: {quotes} if you wrote this variable"),
        ("/b", f"if you wrote a variable, {quotes}"),
    ):
        ran = desk.stagectl("check", "--quiet", f"/a:{place}/a", SLURM_TMPDIR="/tmp/17")
        refused = NOT_BENEATH.replace("/b ", f"{place}/a ", 1)
        assert ran == Ran(3, "", f"stage: {refused}; {hint}\n")


def test_check_warns_of_a_source_of_the_wrong_kind(desk: Desk) -> None:
    folder = desk.folder / "set.tar"
    folder.mkdir()
    file = desk.source
    wrong = {
        f"{folder}:/nvme/a,extract": f"{folder} is a folder; extract is for archives",
        f"{file}:/nvme/c,mode=shard": f"{file} is not a folder; mode=shard is for folders",
        f"{file}:/nvme/d,include=*.bin": (
            f"{file} is not a folder; remove include and exclude, which are for folders"
        ),
    }
    ran = desk.stagectl("check", *wrong, f"{file}:/nvme/e", f"{folder}:/nvme/f,include=*")
    assert (ran.code, ran.err) == (
        0, "".join(f"stage: on this machine {why}\n" for why in wrong.values())
    )  # fmt: skip


CONFIGS: dict[str, tuple[str, str]] = {
    "not TOML": ("roots = [", " is not TOML: Invalid value (at end of document)"),
    "an unknown key": (
        'roots = ["/nvme"]\nrots = 1',
        ": rots: unknown key; did you mean roots? stage.toml(5) lists all",
    ),
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
    assert desk.stagectl("check", "/a:/nvme/b") == Ran(
        3, "", f"stage: {desk.config}{problem}; tell the administrator\n"
    )


@pytest.mark.parametrize(
    ("name", "problem"),
    [(".", "Is a directory"), ("x" * 256, "File name too long")],
    ids=["a folder", "a long name"],
)
def test_a_stage_toml_that_cannot_be_read_is_a_refusal(desk: Desk, name: str, problem: str) -> None:
    desk.config = desk.folder / name
    assert desk.stagectl("check", "/a:/nvme/b") == Ran(
        3, "", f"stage: {desk.config} cannot be read: {problem}; tell the administrator\n"
    )


ROOT = Path("/")


def assert_explained(ran: Ran, *codes: int) -> None:
    """Check that stdout says what is right, or that stderr has a message and stdout nothing."""
    assert ran.code in (0, *codes)
    if ran.code:
        assert ran.out == ""
        assert re.fullmatch(r"stage: \S(.|\n)*\n", ran.err)
    else:
        warnings = r"stage: (\S+:\d+: warning: |.*: not seen from this machine )"
        assert all(re.match(warnings, line) for line in ran.err.splitlines())
        assert ran.out.startswith("stage: ok: ")


#: All that an argument may hold: no null byte, and bytes that are no UTF-8 as Python has them.
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0") | st.sampled_from(
    [chr(code) for code in range(0xDC80, 0xDD00)]
)
VALUES = st.text(CHARACTERS) | st.lists(
    st.sampled_from(
        ["/a", "/nvme/b", ":", ",", ";", "\\", "=", "validate", "always", " ", "\t", "\n", "é",
         "\udcff", "..", "/", "http://h:1/", "x" * 200],
    )
).map("".join)  # fmt: skip
LINES = st.lists(
    st.sampled_from(
        [b"#STAGE ", b"#SBATCH --stage=", b"#SBATCH --stage ", b"/a /nvme/b", b"/a:/nvme/b",
         b",validate=", b"always", b'"', b"'", b"\\", b"\n", b"\r\n", b"#", b"\xff", b"\0", b";"],
    )
).map(b"".join)  # fmt: skip
TOML = st.lists(
    st.sampled_from(
        ["roots", "=", "[", "]", '"/nvme"', '"nvme/"', "launch", "transfer", ".", "\n", "chunk",
         "'4 MiB'", "-1", "nan", "inf", "1e999", "environment", "{}", "\\u0000", "é"],
    )
).map("".join)  # fmt: skip


@given(st.lists(VALUES, min_size=1, max_size=3))
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
        assert_explained(call(["check", "--config", file.name, "/:/nvme/a"], ROOT), 2, 3)
