"""What is filled in for names in SRC and DST, and every name that is refused."""

from __future__ import annotations

import os
import pwd
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.base.errors import DirectiveError
from stager.request.grammar import parse_value, with_values
from stager.request.names import LETTERS, SPELLINGS, Names, absolute, fill_letters
from tests.support.directives import FOLDER, NAMES, message

if TYPE_CHECKING:
    from pathlib import Path

KNOWN = "known: $SLURM_TMPDIR " + " ".join(f"${name}" for name in SPELLINGS)
SHELL, CHARS = "give --stage on sbatch's command line, in double quotes", "for these characters"
IN_SCRIPT = "for a variable that only the script knows, run stagectl stage in the script"


def fault(text: str, names: Names = NAMES) -> str:
    with pytest.raises(DirectiveError) as caught:
        parse_value(text, names)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "source", "destination"),
    [
        ("/a/%u/%U:/b/%j_%r", "/a/alice/1000", "/b/17_0"),
        ("/a/%A_%a:/b/%x%%j", "/a/16_3", "/b/train%j"),
        ("/a:/b/$USER/${SLURM_JOB_ID}x/$SLURM_JOB_NAME", "/a", "/b/alice/17x/train"),
        ("/a:/b/$SLURM_ARRAY_JOB_ID.$SLURM_ARRAY_TASK_ID", "/a", "/b/16.3"),
        ("/a:$SLURM_TMPDIR/x", "/a", "/nvme/alice.17.0/x"),
        ("/a:${SLURM_TMPDIR}/%j,replace", "/a", "/nvme/alice.17.0/17"),
        ("$SCRATCH/a:/b", "/shared/alice/a", "/b"),
        ("/x/$USER$SCRATCH:/b", "/x/alice/shared/alice", "/b"),
        ("~/a b:/b", "/home/alice/a b", "/b"),
        ("~:/b", "/home/alice", "/b"),
        ("$HOME/a:/b", "/home/alice/a", "/b"),
        ("a:/b", f"{FOLDER}/a", "/b"),
        ("./~bob/%j:/b", f"{FOLDER}/./~bob/17", "/b"),
        ("$STORE/a%20b%j:/b", "s3://bucket/a%20b%j", "/b"),
        ("https://host/%41/$USER:/b", "https://host/%41/alice", "/b"),
        ("@~/url:/b", "@/home/alice/url", "/b"),
        ("@url.%j:/b", f"@{FOLDER}/url.17", "/b"),
        (r"/\%j\$USER:/b/\%%j/\$SLURM_TMPDIR", "/%j$USER", "/b/%17/$SLURM_TMPDIR"),
        (r"/\$1/\$(date)/$/$-/%z/%:/b/%20/%4t", "/$1/$(date)/$/$-/%z/%", "/b/%20/%4t"),
    ],
)
def test_names_are_filled_in(text: str, source: str, destination: str) -> None:
    [directive] = parse_value(text, NAMES)
    assert (directive.source, directive.destination) == (source, destination)
    assert parse_value(with_values(text, NAMES), NAMES) == (directive,)


@settings(deadline=None)
@given(
    form=st.sampled_from(
        ["$V/a:/b", " ${V}:/b;/c/$V:/d", "/x$V/:/b,replace", "@$V:/b", "x/$V.y:/b"]
    ),
    value=st.text("/ab:;,$%\\@~' ") | st.sampled_from(["s3://b/c", "/a:/b", "/a,x=1"]),
)
def test_a_job_gets_what_variables_stand_for_where_it_was_submitted(form: str, value: str) -> None:
    there = replace(NAMES, environment={"V": value})
    try:
        wanted = parse_value(form, there)
    except DirectiveError:
        return
    filled = with_values(form, there)
    assert parse_value(filled, there) == wanted
    if value.startswith("/"):
        assert parse_value(filled, replace(NAMES, environment={})) == wanted


@pytest.mark.parametrize(
    ("text", "problem", "column"),
    [
        ("/a:/b/%N", "%N is not filled in, as the path is one for all nodes and tasks", 6),
        ("/a/%t:/b", "%t is not filled in, as the path is one for all nodes and tasks", 3),
        (
            "/a:/b/%ab",
            ("'%ab' may be meant as a code; write \\% for a percent sign, or "
            "${SLURM_ARRAY_TASK_ID} for the array task's number"),
            6,
        ),
        (
            "/caf%C3%A9:/b",
            ("'%A9' may be meant as a code; write \\% for a percent sign, or ${SLURM_ARRAY_JOB_ID} "
            "for the number of the job's array, or of the job"),
            7,
        ),
        ("/a:$SLURM_TMPDI/x", ("$SLURM_TMPDI is no variable of this site's disks; did you mean "
         f"$SLURM_TMPDIR? ({IN_SCRIPT})"), 3),
        ("/a:/b/$HOME", f"$HOME is no variable of this site's disks; {KNOWN} ({IN_SCRIPT})", 6),
        ("/a:/b/$SLURM_TMPDIR", "$SLURM_TMPDIR can only begin a destination", 6),
        ("$SLURM_TMPDIR/a:/b", ("$SLURM_TMPDIR is on each node's own disk, from which nothing is "
         "copied back; have the script move results to shared storage"), 0),
        ("/a:$USER/b", "the destination must begin with '/' or a variable of the site", 3),
        ("$NONE/a:/b", "NONE is not set in the job's environment; set it, or write its value", 0),
        ("/$EMPTY:/b", "EMPTY is not set in the job's environment; set it, or write its value", 1),
        ("/a/$1.tar:/b", f"only a shell fills in '$1': {SHELL}, or write \\$1 {CHARS}", 3),
        ("/a/$(ls):/b", f"only a shell fills in '$(': {SHELL}, or write \\$( {CHARS}", 3),
        ("s3://b/${X:-y}:/b", f"only a shell fills in '${{': {SHELL}, or write \\${{ {CHARS}", 7),
        ("/a:/b/$@", f"only a shell fills in '$@': {SHELL}, or write \\$@ {CHARS}", 6),
        (
            "~bob/a:/b",
            ("only ~/ is known, your own home; write the whole path, or ./~ for a name that begins "
            "with ~"),
            0,
        ),
    ],
)  # fmt: skip
def test_a_name_that_is_not_known_is_refused(text: str, problem: str, column: int) -> None:
    if "is not filled in" in problem:
        problem += "; known: %u %U %j %A %a %x %r; write \\% for a percent sign"
    assert fault(text) == message(problem, text, column)


@pytest.mark.parametrize(
    ("value", "shown"),
    [("", ""), (".", "."), ("..", ".."), ("a/b", "a/b"), ("/", "/"), ("a\nb", "a?b")],
)
@pytest.mark.parametrize("text", ["/a:/b/%x", "/a/%x:/b", "/a:/b/$SLURM_JOB_NAME"])
def test_what_cannot_be_a_name_in_a_path_is_refused(text: str, value: str, shown: str) -> None:
    names = replace(NAMES, letters={**NAMES.letters, "x": value})
    name = "%x" if "%x" in text else "$SLURM_JOB_NAME"
    assert fault(text, names).splitlines()[0] == (
        f"{name} is the job's name, '{shown}', which cannot be in a path; write \\{name} for these "
        "characters"
    )


@pytest.mark.parametrize("text", ["/a:/b/${USER:-x}", "/a:/b/${", "/a/${1}:/b", "s3://b/${x/a:/b"])
def test_what_a_shell_alone_fills_in_is_refused(text: str) -> None:
    problem = f"only a shell fills in '${{': {SHELL}, or write \\${{ {CHARS}"
    assert fault(text) == message(problem, text, text.index("$"))
    [directive] = parse_value(text.replace("$", r"\$"), NAMES)
    assert "${" in directive.source + directive.destination


@pytest.mark.parametrize("name", ["LD_DATA", "PYTHONPATH", "OMPI_HOME", "STAGE_DIR", "PATH"])
def test_what_the_helper_would_run_by_is_refused_at_submission(name: str) -> None:
    names = Names.at_submission({name: "/x", f"A{name}": "/y"}, {})
    problem = f"{name} does not reach the stage; write its value"
    assert fault(f"${name}/a:/b", names) == message(problem, f"${name}/a:/b", 0)
    assert parse_value(f"$A{name}/a:/b", names)[0].source == "/y/a"


def test_a_relative_source_needs_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for names in (Names.of({}, {}), Names.at_submission({}, {})):
        problem = "the current folder was removed; write the whole path"
        assert fault("a:/b", names) == message(problem, "a:/b", 0)
        assert parse_value("/a:/b", names)[0].source == "/a"


def test_an_srun_is_checked_with_the_names_of_its_job() -> None:
    environment = {"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "train"}
    [directive] = parse_value("/a:/b/%j_%r/%x", Names.at_submission(environment, {}, is_step=True))
    assert directive.destination == "/b/17_0/%x"


@pytest.mark.parametrize(
    "text",
    [
        "$UP/a:/b",
        "/a/$DOT.:/b",
        "/a/.$DOT/b:/b",
        "$UP:/b",
        "@$UP:/b",
        "/a/..$ROOT:/b",
        "/a$ROOT..:/b",
    ],
)
def test_nothing_that_is_filled_in_climbs(text: str) -> None:
    names = replace(NAMES, environment={"UP": "/x/..", "DOT": ".", "ROOT": "/"})
    assert fault(text, names) == message(
        "this brings a '..' into the path; write it whole", text, text.index("$")
    )


@settings(max_examples=500, deadline=None)
@given(st.text("./a$%u", max_size=8), st.text("./a~", max_size=4), st.text("./", max_size=3))
def test_no_value_adds_a_climb(path: str, value: str, letter: str) -> None:
    names = replace(NAMES, environment={"a": value}, letters={"u": letter or "x"})
    try:
        [directive] = parse_value(f"/{path}:/b", names)
    except DirectiveError:
        return
    written = f"/{path}".split("/").count("..")
    assert directive.source.split("/").count("..") == written


def test_what_only_a_job_knows_stands_for_itself_at_submission(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir("/usr")
    user = pwd.getpwuid(os.getuid()).pw_name
    names = Names.at_submission({"HOME": "/home/al", "DATA": "/data"}, {"T": "/nvme/%u.%j.%r"})
    text = "%a/%x:$T/$SLURM_ARRAY_JOB_ID;$LATER/x.tar:/b,extract;$DATA/~:/b/%U;~/$LATER:/c"
    parsed = parse_value(text, names)
    assert [(one.source, one.destination) for one in parsed] == [
        ("/usr/%a/%x", f"/nvme/{user}.%j.%r/%A"),
        ("/usr/$LATER/x.tar", "/b"),
        ("/data/~", f"/b/{os.getuid()}"),
        ("/home/al/$LATER", "/c"),
    ]
    assert [names.is_filled(one.source) for one in parsed] == [False, False, True, False]
    assert names.unset() == ["LATER"]
    # What kind of source it is, is not known either.
    assert parse_value("$LATER:/b,extract;hf://$LATER:/c,layout=hub;s3://$LATER/x:/d", names)
    anywhere = Names.at_submission({}, None)
    assert parse_value("/a:$SOME/b", anywhere)[0].destination == "/$SOME/b"


def test_a_job_and_its_user_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/usr")
    user = {"u": pwd.getpwuid(os.getuid()).pw_name, "U": str(os.getuid())}
    outside = Names.of({"HOME": "/home/al"}, {})
    assert (outside.letters, outside.folder, outside.home) == (user, "/usr", "/home/al")
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "x", "SLURM_SUBMIT_DIR": "/shared"}
    inside = Names.of(job, {})
    assert inside.letters == {**user, "j": "17", "A": "17", "x": "x", "r": "0"}
    assert inside.folder == "/shared"
    task = Names.of(
        {**job, "SLURM_ARRAY_JOB_ID": "16", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"},
        {},
    )
    assert task.letters == {**inside.letters, "A": "16", "a": "3", "r": "2"}
    assert fault("/a:/b/%j", outside).startswith("%j is not known outside of a job; ")
    assert fault("/a:/b/%a", inside).startswith("%a is not known outside of a job array; ")


def test_a_variable_that_a_shell_has_replaced_is_told() -> None:
    names = replace(NAMES, environment={"SLURM_TMPDIR": "/tmp"})
    assert names.hint("/tmp/x") == (
        "; /tmp is what $SLURM_TMPDIR is here: put the value in single quotes if you wrote this "
        "variable"
    )
    assert names.hint("/x") == "; if you wrote a variable, put the value in single quotes"
    assert replace(names, variables={}).hint("/x") == ""


def test_letters_are_filled_into_paths_of_the_site() -> None:
    letters = dict.fromkeys(LETTERS, "1")
    assert fill_letters("/s/%u.%U.%j.%A.%a.%x.%r/%%", letters) == "/s/1.1.1.1.1.1.1/%"
    for pattern, problem in (
        ("/s/%N", "'%N' is not known; known: %u %U %j %A %a %x %r %%"),
        ("/s/%", "'%' is not known; known: %u %U %j %A %a %x %r %%"),
        ("/s/%j", "%j is not known outside of a job"),
        ("/s/%x", "%x is the job's name, '..', which cannot be in a path"),
        ("/s/../%u", "/s/../%u would be /s/../x"),
    ):
        with pytest.raises(ValueError, match=r"known|cannot|would") as caught:
            fill_letters(pattern, {"x": "..", "u": "x"})
        assert str(caught.value) == problem


@pytest.mark.parametrize(
    ("path", "expected"), [("a", "/a"), ("./a/../b//", "/b"), ("/x/./y/", None), ("", "")]
)
def test_a_path_is_made_absolute_and_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, expected: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute(path) == ("/x/y" if expected is None else f"{tmp_path}{expected}")
