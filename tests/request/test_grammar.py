"""Every text that the grammar takes, and the whole message for every text that it refuses."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stager.base.errors import DirectiveError, UsageError
from stager.base.options import ITSELF, Lifetime, Links, Mode, Options, Share, Validate, Verify
from stager.base.text import showable
from stager.request.grammar import MAX_LIST, RESERVED, Directive, print_value
from tests.support.directives import (
    BASH,
    DIRECTIVES,
    FOLDER,
    NEARLY,
    TEXTS,
    assert_the_caret_is_under_the_text,
    fault_of,
    message,
    parse_script,
    parse_value,
)

ROOT = Path(__file__).parents[2]
CONTROL = "a control character is not allowed in a directive"
NOTHING = "source and destination are missing: write {}"
NO_COLON = "no ':' between source and destination: write {}"
NO_DESTINATION = (
    "the destination must begin with '/' or a variable of the site, right behind ':': write {}"
)
VALUE, LINE = "SRC:DST", "#STAGE SRC:DST[,key=value…]"
WEB_USER = (
    "has a user in it, whom others would see; use ~/.netrc, or write the URL into a file of your "
    "own with mode 600, and @/PATH/OF/FILE as source"
)
SECOND = (
    "a second ':' before a path; write ';' before another SRC:DST, or write \\: where it is part "
    "of a path"
)
EMPTY = "the source is empty; an empty folder can be made in shared: only, by :shared:/DIR"
NO_SHARED = "write '/' behind shared:, as in shared:/data/"
CLIMBS = "'..' is not allowed in a destination"
IN_SBATCH = " (in an #SBATCH line \\\\{})"
UNKNOWN_URL = (
    "is a URL of an unknown kind; known: az://, s3://, gs://, hf://, https://, http://, docker://"
)
KNOWN = (
    "validate, verify, lifetime, relocate, include, exclude, extract, decompress, mode, by, share, "
    "layout, links, replace, via, as"
)
IN_PATH = "If not, write \\, where it is part of a path"
NO_NUMBER = (
    "'{}' is not a valid pattern; write {{n}} once, in place of the number, and at most two * in "
    "each name, as in part-{{n}}.*"
)


def value_fault(text: str) -> str:
    with pytest.raises(DirectiveError) as caught:
        parse_value(text)
    return str(caught.value)


def line_fault(line: str) -> str:
    with pytest.raises(DirectiveError) as caught:
        parse_script([BASH, line])
    return str(caught.value)


# a value that is right


@pytest.mark.parametrize(
    ("text", "directives"),
    [
        ("/a:/b", [Directive("/a", "/b")]),
        ("/a:/b/", [Directive("/a", "/b/")]),
        ("/a/../x:/b", [Directive("/a/../x", "/b")]),
        ("/a:/b..c/...", [Directive("/a", "/b..c/...")]),
        ("/a:/b,validate=stat", [Directive("/a", "/b", Options(validate=Validate.STAT))]),
        ("/a:/b,validate=always", [Directive("/a", "/b", Options(validate=Validate.ALWAYS))]),
        ("/a:/b,validate=checksum", [Directive("/a", "/b", Options(validate=Validate.CHECKSUM))]),
        ("/a:/b,verify=stream", [Directive("/a", "/b")]),
        ("/a:/b,lifetime=job", [Directive("/a", "/b", Options(lifetime=Lifetime.JOB))]),
        ("/a:/b,lifetime=cache", [Directive("/a", "/b")]),
        ("/a:/b,verify=readback", [Directive("/a", "/b", Options(verify=Verify.READBACK))]),
        (
            "/a:/b,verify=readback,validate=always",
            [Directive("/a", "/b", Options(validate=Validate.ALWAYS, verify=Verify.READBACK))],
        ),
        ("/a:/b;/c:/d", [Directive("/a", "/b"), Directive("/c", "/d")]),
        (
            "/a:/b,validate=always;/c:/d",
            [Directive("/a", "/b", Options(validate=Validate.ALWAYS)), Directive("/c", "/d")],
        ),
        ("/a:/b;/a:/b", [Directive("/a", "/b"), Directive("/a", "/b")]),
    ],
)
def test_a_value_is_directives_joined_by_semicolons(text: str, directives: list[Directive]) -> None:
    assert parse_value(text) == tuple(directives)


@pytest.mark.parametrize(
    ("text", "source", "destination"),
    [
        ("/a:b:/c", "/a:b", "/c"),
        ("/a::/b", "/a:", "/b"),
        ("/a:/b:c", "/a", "/b:c"),
        ("/a,b:/c", "/a,b", "/c"),
        ("/a,replace:/c", "/a,replace", "/c"),
        ("/a:/b,", "/a", "/b,"),
        ("/a:/b,c.tar", "/a", "/b,c.tar"),
        ("/a:/b,1,2 3,replace", "/a", "/b,1,2 3"),
        ("/a:/b,é", "/a", "/b,é"),
        ("/a b :/c d", "/a b ", "/c d"),
        (" \t/a:/b", "/a", "/b"),
        ("/a=1:/b='2'", "/a=1", "/b='2'"),
        ("/a#1:/b#2", "/a#1", "/b#2"),
        ("/a~:/~/b", "/a~", "/~/b"),
        ("/a\\b:/c\\ d\\e", "/a\\b", "/c\\ d\\e"),
        (r"/a\:/b:/c\:/d", "/a:/b", "/c:/d"),
        (r"/a\:\$b:/c", "/a:$b", "/c"),
        (r"/a:/b\,replace", "/a", "/b,replace"),
        (r"/a\;b:/c\;d", "/a;b", "/c;d"),
        (r"/\$USER\\:/\%j\\\\", "/$USER\\", "/%j\\\\"),
        ("/a$:/b/$/$.1/50%/%20", "/a$", "/b/$/$.1/50%/%20"),
        ("a/b:/c", f"{FOLDER}/a/b", "/c"),
        ("../a:/c", f"{FOLDER}/../a", "/c"),
        ("C:/c", f"{FOLDER}/C", "/c"),
        ("/a:shared:/", "/a", "shared:/"),
        ("a:shared:/b/", f"{FOLDER}/a", "shared:/b/"),
        ("s3://bucket/a:b:shared:/b,1", "s3://bucket/a:b", "shared:/b,1"),
        ("docker://host:5000/a:1:shared:/b", "docker://host:5000/a:1", "shared:/b"),
        ("https://host:80/a:shared:/%j", "https://host:80/a", "shared:/17"),
        (r"/a\:shared:/b", "/a:shared", "/b"),
        ("shared:/b", f"{FOLDER}/shared", "/b"),
        (":shared:/scratch", "", "shared:/scratch"),
        (":shared:/", "", "shared:/"),
    ],
)
def test_only_what_leads_to_a_path_or_an_option_separates(
    text: str, source: str, destination: str
) -> None:
    [value] = parse_value(text)
    assert (value.source, value.destination) == (source, destination)
    [line] = parse_script([BASH, f"#STAGE {text}\n"])
    assert line == value


@pytest.mark.parametrize(
    "char", ["'", '"', "#", "=", "~", "$", "%", "*", "é", "漢", "😀", "\udcff"]
)
def test_any_other_character_belongs_to_the_path(char: str) -> None:
    assert parse_value(f"/a{char}:/{char}.b") == (Directive(f"/a{char}", f"/{char}.b"),)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.lists(NEARLY, max_size=3).map("".join), min_size=1, max_size=3))
def test_no_separator_between_directives_is_lost(texts: list[str]) -> None:
    """What follows a ';' is read as it is read alone."""
    whole = [text for text in texts if not fault_of(parse_value, text)]
    directives = [one for text in whole for one in parse_value(text)]
    joined = ";".join(whole)
    # A backslash at the end would escape the ';'.
    if whole and not any(text.endswith("\\") for text in whole[:-1]):
        assert parse_value(joined) == tuple(directives)


@settings(max_examples=500, deadline=None)
@given(DIRECTIVES, DIRECTIVES)
def test_nothing_of_a_path_is_taken_for_a_separator(one: Directive, other: Directive) -> None:
    assert parse_value(f"{one};{other}") == (one, other)


# a value that is refused


@pytest.mark.parametrize(
    ("text", "problem", "column"),
    [
        ("", NOTHING, 0),
        ("  ", NOTHING, 2),
        ("/a:/b;", NOTHING, 6),
        (";/a:/b", NOTHING, 0),
        ("/a:/b; ;/c:/d", NOTHING, 7),
        ("/a", NO_COLON, 2),
        ("/a\\:/b", NO_COLON, 6),
        ("/a,validate=always", NO_COLON, 18),
        ("/a:/b;/c", NO_COLON, 8),
        ("/a, /b", NO_COLON, 6),
        ("/a:", NO_DESTINATION, 3),
        ("/a: ,validate=always", NO_DESTINATION, 3),
        ("/a:b", NO_DESTINATION, 3),
        ("/a: /b", NO_DESTINATION, 3),
        ("/a:~/b", NO_DESTINATION, 3),
        ("/a:/b;/c:d", NO_DESTINATION, 9),
        ("https://h:80", NO_DESTINATION, 10),
        (":/b", EMPTY, 0),
        (":/nvme/x,replace", EMPTY, 0),
        (":", NO_DESTINATION, 1),
        ("/a:shared:", NO_SHARED, 10),
        ("/a:shared:data", NO_SHARED, 10),
        ("/a:shared:$SLURM_TMPDIR", NO_SHARED, 10),
        ("s3://b/a:shared:data,replace", NO_SHARED, 16),
        (":shared:scratch", NO_SHARED, 8),
        (":shared:/scratch,replace", "an empty folder takes no options; remove this one", 17),
        (":shared:/../x", CLIMBS, 8),
        ("/a:shared:/..", CLIMBS, 10),
        ("/a:shared:/b:/c", f"{SECOND}{IN_SBATCH.format(':')}", 12),
        ("/a:shared:/b:shared:/c", f"{SECOND}{IN_SBATCH.format(':')}", 12),
    ],
)
def test_a_value_without_its_two_paths_is_refused(text: str, problem: str, column: int) -> None:
    assert value_fault(text) == message(problem.format(VALUE), text, column)


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("/a:/b:/c", 5),
        ("/a:/b:$c", 5),
        ("/a:/nvme/a,/b:/nvme/b", 13),
        ("/a:/nvme/a,replace,/b:/nvme/b", 21),
        ("/a:/nvme/a,exclude=x,/b:/nvme/b", 23),
        ("/a:/nvme/a, s3://bucket/b:/nvme/b", 14),
        ("/a:/b:s3://c", 8),
    ],
)
def test_a_second_colon_before_a_path_is_refused(text: str, column: int) -> None:
    assert value_fault(text) == message(f"{SECOND}{IN_SBATCH.format(':')}", text, column)


@pytest.mark.parametrize("text", ["/a:/b ", "/a:/b ;/c:/d", "/a:/b\t,replace"])
def test_a_blank_that_ends_a_destination_is_refused(text: str) -> None:
    problem = "a blank ends the destination; remove it"
    assert fault_of(parse_value, text)
    assert value_fault(text).startswith(f"{problem}\n")


@pytest.mark.parametrize(("text", "column"), [('"/a:/b"', 0), ("'/a b':/c", 0), (" 'a':/b", 1)])
def test_a_source_in_quotes_of_its_own_is_refused(text: str, column: int) -> None:
    problem = (
        "the source begins with a quotation mark; remove the quotes, a blank needs none (write ./ "
        "before a name that begins with one)"
    )
    assert value_fault(text) == message(problem, text, column)


@pytest.mark.parametrize(
    ("text", "column"),
    [("/a:/b/c lifetime=job", 7), ("/a:/b, replace", 6), ("/a:/b replace,extract", 5)],
)
def test_an_option_after_a_space_is_no_part_of_a_path(text: str, column: int) -> None:
    problem = "write ',', without a blank, before an option"
    assert value_fault(text) == message(problem, text, column)
    for path in ("/b/my extracts of 2026", "/b/save as is"):
        assert parse_value(f"/a:{path}") == (Directive("/a", path),)


@pytest.mark.parametrize("text", ["/a:/b/../c", "/a:/..", "/a:/b/..", "/a:/../", "/a:/b/../../c"])
def test_a_destination_that_climbs_is_refused(text: str) -> None:
    assert value_fault(text) == message("'..' is not allowed in a destination", text, 3)


@pytest.mark.parametrize(
    "text",
    [
        "https://host/a:/b",
        "https://host:8080/a:/b",
        "http://host:80/a/b%20c:/b",
        "s3://bucket/key/with/more:/b",
        "az://account/container/a:/b",
        "gs://bucket/a:/b",
        "s3://bucket/set.tar?versionId=3sL4kqtJlcpXroDTDmJ-rmSpXd3dIbrHY.MTRCxf3vjVBH40_Nr8:/b",
        "az://account/container/a b?versionid=2026-11-28T14:30:05.1234567Z:/b",
        "s3://bucket/folder/:/b",
        "s3://bucket/:/b",
        "az://account/container/:/b",
        "hf://org/model:/b",
        "hf://gpt2:/b",
        "hf://gpt2@refs/pr/1:/b",
        "hf://datasets/squad:/b",
        "hf://org/model@refs/pr/1:/b",
        "hf://datasets/org/set.v2@v1.0:/b",
        "docker://host:5000/team/image:/b",
        "docker://docker.io/image:v1.2-rc_3:/b",
        "docker://docker.io/image@sha256:" + "0" * 64 + ":/b",
        "docker://docker.io/image:v1@sha256:" + "0" * 64 + ":/b",
    ],
)
def test_the_colons_of_a_url_separate_nothing(text: str) -> None:
    [directive] = parse_value(text)
    assert (directive.source, directive.destination) == (text.removesuffix(":/b"), "/b")
    assert parse_value(print_value([directive])) == (directive,)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("git+ssh://host/a", UNKNOWN_URL),
        ("file:///a", UNKNOWN_URL),
        ("S3://bucket/a", UNKNOWN_URL),
        ("http://host", "is not complete; write http://HOST/PATH"),
        ("s3://bucket", "is not complete; write s3://BUCKET/KEY"),
        ("s3:///", "is not complete; write s3://BUCKET/KEY"),
        ("az://account/container", "is not complete; write az://ACCOUNT/CONTAINER/PATH"),
        ("https://host/folder/", "ends in '/', but a web server cannot be asked what lies beneath"),
        ("https://host/", "ends in '/', but a web server cannot be asked what lies beneath"),
        ("s3://bucket/folder//", "has an empty part, '.' or '..' in its path"),
        ("hf://", "is not complete; write hf://ORG/MODEL[@REVISION]"),
        ("hf://org//", "is not complete; write hf://ORG/MODEL[@REVISION]"),
        ("hf://datasets/", "is not complete; write hf://ORG/MODEL[@REVISION]"),
        ("hf://org/model@", "is not complete; write hf://ORG/MODEL[@REVISION]"),
        (
            "hf://org/model/config.json",
            "names a file or folder of a model; stage the model, with include=",
        ),
        (
            "hf://org/..",
            (
                "has a name that is not valid: use only letters, digits, '-', '_' and '.', a "
                "letter or digit first"
            ),
        ),
        (
            "hf://org/model@a/../b",
            "has a revision that is not valid: write a branch, tag or commit",
        ),
        ("hf://org/model@a b", "has a revision that is not valid: write a branch, tag or commit"),
        ("https://host/a/../b", "has an empty part, '.' or '..' in its path"),
        ("https://host/a%2F%2e%2E%2fb", "has an empty part, '.' or '..' in its path"),
        ("https://host/a%0Ab", "has a character in its path that cannot be printed"),
        ("https://host/%ff", "has '%' codes in its path that are not UTF-8"),
        ("https://[bad/x", "has a host that is not valid: write HOST or HOST:PORT (1 to 65535)"),
        (
            "https://host:99999/x",
            "has a host that is not valid: write HOST or HOST:PORT (1 to 65535)",
        ),
        (
            "s3://my bucket/k",
            (
                "has a name that is not valid: use only letters, digits, '-', '_' and '.', a "
                "letter or digit first"
            ),
        ),
        ("s3://bucket/folder/?versionId=3", "names a version, which a folder does not have"),
        *(
            (
                url,
                (
                    "has a '?' or '#': what follows may be a secret, which others would see in the "
                    "job's description; give credentials by the environment"
                ),
            )
            for url in ("s3://bucket/a?versionId=3&X-Amz-Signature=4", "gs://bucket/a?versionId=3")
        ),
        (
            "az://evil.com#/c/k",
            (
                "has a '?' or '#': what follows may be a secret, which others would see in the "
                "job's description; give credentials by the environment"
            ),
        ),
        (
            "az://evil.com/c/k",
            "has an account that is not valid: use only 3 to 24 lower-case letters and digits",
        ),
        ("docker://me@docker.io/a", "has a user in it; give credentials by the environment"),
        ("docker://me:secret@docker.io/a", "has a user in it; give credentials by the environment"),
        ("https://me:secret@host/a", WEB_USER),
        ("https://me:secret@host:8443/a", WEB_USER),
        (
            "docker://nvcr.io#team/x:v2",
            "is written as for enroot; write docker://nvcr.io/team/x:v2",
        ),
        (
            "docker://reg:5000#team/x:v2",
            "is written as for enroot; write docker://reg:5000/team/x:v2",
        ),
        ("docker://nvcr.io#x:v2", "is written as for enroot; write docker://nvcr.io/x:v2"),
        (
            "docker://me@nvcr.io#team/x:v2",
            "has a user in it; leave it out and log in (skopeo login, docker login)",
        ),
        ("docker://docker.io", "is not complete; write docker://REGISTRY/NAME:TAG"),
        (
            "docker://library/ubuntu:22.04",
            (
                "has no registry: library is no host with a '.' or a port; write "
                "docker://REGISTRY/NAME:TAG, for instance with docker.io"
            ),
        ),
        ("https://me@host/a", WEB_USER),
        (
            "https://host/a?sig=secret",
            (
                "has a '?' or '#': what follows may be a secret, which others would see in the "
                "job's description; write the URL into a file of your own with mode 600, and "
                "@/PATH/OF/FILE as source"
            ),
        ),
    ],
)
def test_a_url_that_cannot_be_staged_is_refused(url: str, problem: str) -> None:
    text = f"{url}:/b"
    assert value_fault(text) == message(f"the source {problem}", showable(text), 0)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:secret@host/a:/b", "https://*********@host/a:/b"),
        ("https://me:se?cret@host/a:/b", "https://**********@host/a:/b"),
        ("https://host/a?sig=secret:/b", "https://host/a?*************"),
        ("/c:/d;docker://me@docker.io/a:/b", "/c:/d;docker://**@docker.io/a:/b"),
    ],
)
def test_what_may_be_secret_in_a_url_is_not_shown(text: str, shown: str) -> None:
    assert value_fault(text).splitlines()[1] == f"  {shown}"


@pytest.mark.parametrize("text", ["/a:https://host/b", "/a:https://host:80/b", "/a:s3://b/c"])
def test_a_url_as_destination_is_refused_as_one(text: str) -> None:
    problem = "the destination is a URL; choose a path on the nodes' disks"
    assert value_fault(text) == message(problem, text, 3)


@pytest.mark.parametrize("char", ["\0", "\n", "\r", "\x1b", "\x1f"])
def test_a_control_character_is_refused(char: str) -> None:
    assert value_fault(f"/a:/b{char}") == message(CONTROL, "/a:/b?", 5)
    assert value_fault(f"/a\\{char}:/b") == message(CONTROL, "/a\\?:/b", 3)


@pytest.mark.parametrize(
    ("text", "problem", "column"),
    [
        ("/a:/b,verify=x", "'x' is not one of stream, readback", 13),
        ("/a:/b,verify=readback,verify=stream", "'verify' is given twice", 22),
        ("/a:/b,lifetime=forever", "'forever' is not one of cache, job", 15),
        ("/a:/b,lifetime", "'lifetime' needs a value: lifetime=cache or job", 6),
        ("/a:/b,lifetime=job,lifetime=job", "'lifetime' is given twice", 19),
        (
            "/a:/b,validate",
            "'validate' needs a value: validate=stat or checksum or always",
            6,
        ),
        ("/a:/b,validate=always,validate=always", "'validate' is given twice", 22),
        ("/a:/b,validate=always,validate", "'validate' is given twice", 22),
        ("/a:/b,validate=", "'' is not one of stat, checksum, always", 15),
        ("/a:/b,validate=Size", "'Size' is not one of stat, checksum, always", 15),
        ("/a:/b,validate= size", "' size' is not one of stat, checksum, always", 15),
        ("/a:/b,validate=always,", "'always,' is not one of stat, checksum, always", 15),
        ("/a:/b,validate=always=1", "'always=1' is not one of stat, checksum, always", 15),
        ("/a\\,:/b,validate=x", "'x' is not one of stat, checksum, always", 17),
        ("/a:/b;/c:/d,validate=x", "'x' is not one of stat, checksum, always", 21),
        ("/a:/b,replace,", "no option follows ','; write one, or remove ','", 13),
        ("/a:/b,replace,, extract", "no option follows ','; write one, or remove ','", 13),
        ("/a:/b,replace, /c", "write ';', not ',', before another SRC:DST", 13),
    ],
)
def test_an_option_that_is_wrong_is_refused(text: str, problem: str, column: int) -> None:
    assert value_fault(text) == message(problem, text, column)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("/a:/b,lifetim=job", "unknown option 'lifetim'; did you mean 'lifetime'?"),
        ("/a:/b,verfy=x", "unknown option 'verfy'; did you mean 'verify'?"),
        ("/a:/b,Validate=size", "unknown option 'Validate'; did you mean 'validate'?"),
        ("/a:/b,EXTRACT", "unknown option 'EXTRACT'; did you mean 'extract'?"),
        ("/a:/b,owner=0", f"unknown option 'owner'; known: {KNOWN}."),
        ("/a:/b,owner", f"unknown option 'owner'; known: {KNOWN}."),
        ("/a:/b,shard", "unknown option 'shard'; did you mean 'mode=shard'?"),
        ("/a:/b,mod=shard", "unknown option 'mod'; did you mean 'mode'?"),
    ],
)
def test_an_unknown_option_is_refused(text: str, problem: str) -> None:
    assert value_fault(text) == message(f"{problem} {IN_PATH}{IN_SBATCH.format(',')}", text, 6)
    assert line_fault(f"#STAGE {text}") == message(f"{problem} {IN_PATH}", f"#STAGE {text}", 13)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("/a:/b,validate=\udc80", "'\\x80' is not one of stat, checksum, always"),
    ],
)
def test_what_a_message_quotes_is_printable_like_its_window(text: str, problem: str) -> None:
    assert value_fault(text).splitlines()[0] == problem


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("a" * 20_000, 20_000),
        ("/a:" * 6_666 + "/b", 2 + 3),
        ("/" + "a" * 9_999 + "\x1b" + "a" * 9_999, 10_000),
        ("/" + "a" * 9_998 + ":" + "b" * 10_000, 10_000),
        ("/a:/b;" * 3_333 + "/c", 20_000),
        ("/a:/b," + "k" * 19_994, 6),
    ],
)
def test_the_caret_is_found_in_a_text_of_20_000_characters(text: str, position: int) -> None:
    with pytest.raises(DirectiveError) as caught:
        parse_value(text)
    assert (len(text), caught.value.position) == (20_000, position)
    assert_the_caret_is_under_the_text(caught.value)


# the length of a value


@pytest.mark.parametrize("char", ["b", "é", "😀", "\udcff"])
def test_a_value_may_have_as_many_bytes_as_the_plugin_takes(char: str) -> None:
    count, rest = divmod(MAX_LIST - len("/a:/"), len(os.fsencode(char)))
    destination = f"/{'c' * rest}{char * count}"
    assert parse_value(f"/a:{destination}") == (Directive("/a", destination),)


def test_the_plugin_takes_as_many_bytes() -> None:
    header = (Path(__file__).parents[2] / "prolog/spank/stage.h").read_text()
    assert "enum { STAGE_LIST_MAX = 120 * 1024 };" in header
    assert MAX_LIST == 120 * 1024


@pytest.mark.parametrize("char", ["b", "\udcff"])
def test_a_longer_value_is_refused(char: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_value("/a:/".ljust(MAX_LIST + 1, char))
    assert str(caught.value) == (
        "the --stage value has 122881 bytes; 122880 are allowed: write #STAGE lines in the batch "
        "script, or stage an archive instead of many files"
    )


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_any_text_is_taken_as_a_value_or_refused_with_a_caret_under_it(text: str) -> None:
    error = fault_of(parse_value, text)
    if error:
        assert_the_caret_is_under_the_text(error)
    else:
        directives = parse_value(text)
        assert parse_value(print_value(directives)) == directives


@settings(max_examples=60, deadline=None)
@given(NEARLY, st.integers(0, 20_000))
def test_the_caret_is_under_a_fault_however_far_into_the_value(text: str, before: int) -> None:
    assume(not text.endswith("\\") and fault_of(parse_value, text))
    with pytest.raises(DirectiveError) as caught:
        parse_value(f"/{'a' * before}:/b;{text};/a:/{'b' * (20_000 - before)}")
    assert_the_caret_is_under_the_text(caught.value)


# a #STAGE line


@pytest.mark.parametrize(
    ("line", "directive"),
    [
        ("#STAGE /a:/b", Directive("/a", "/b")),
        ("#STAGE \t /a:/b \t\r\n", Directive("/a", "/b")),
        ("#STAGE /a b:/c/d e/", Directive("/a b", "/c/d e/")),
        ("#STAGE /it's:/b\"c", Directive("/it's", '/b"c')),
        ("#STAGE /a:/b,validate=always", Directive("/a", "/b", Options(validate=Validate.ALWAYS))),
        ("#STAGE /a#1:/b#2", Directive("/a#1", "/b#2")),
        ("#STAGE /a:/b,exclude=x y ", Directive("/a", "/b", Options(exclude=("x y",)))),
    ],
)
def test_the_rest_of_a_line_is_the_value(line: str, directive: Directive) -> None:
    assert parse_script([BASH, line]) == (directive,)


def test_a_line_may_join_directives() -> None:
    assert parse_script([BASH, "#STAGE /a:/b; /c:/d"]) == parse_value("/a:/b; /c:/d")


@pytest.mark.parametrize(
    ("line", "problem", "column"),
    [
        ("#STAGE", NOTHING, 6),
        ("#STAGE   ", NOTHING, 6),
        ("#STAGE /a:/b;", NOTHING, 13),
        ("#STAGE a b", NO_COLON, 10),
        ("#STAGE /a /nvme/b", NO_COLON, 17),
        ("#STAGE /a validate=always", NO_COLON, 25),
        ("#STAGE s3://b/k", NO_COLON, 15),
        ("#STAGE /a:b", NO_DESTINATION, 10),
        ("#STAGE\u00a0/a:/b", "write a space behind #STAGE: {}", 6),
        ("#STAGE --stage=/a:/b", "leave out --stage=: write {}", 7),
        ("#STAGE --stage /a:/b", "leave out --stage: write {}", 7),
        ("#STAGE --stage", "leave out --stage: write {}", 7),
        ("#STAGE /a:/b:/c", SECOND, 12),
        ("#STAGE /a:/b/../c", "'..' is not allowed in a destination", 10),
        ("#STAGE /a:s3://b/k", "the destination is a URL; choose a path on the nodes' disks", 10),
        ("#STAGE /a:/b,mode=shard,by=part", NO_NUMBER.replace("{}", "part", 1), 27),
        ("#STAGE /a:/b,validate=x", "'x' is not one of stat, checksum, always", 22),
        ("#STAGE /a\x1b:/b", CONTROL, 9),
        ("#STAGE /a\r :/b", CONTROL, 9),
    ],
)
def test_a_line_that_is_wrong_is_refused(line: str, problem: str, column: int) -> None:
    shown = line.replace("\x1b", "?").replace("\r", "?").replace("\u00a0", "?")
    assert line_fault(line) == message(problem.format(LINE, n="{n}"), shown, column)


@pytest.mark.parametrize("text", ["/a:/b\\", "/a:/b\\\\\\"])
def test_no_value_takes_the_meaning_from_the_separator_behind_it(text: str) -> None:
    problem = "a backslash ends the value; write two where it is part of a path"
    with pytest.raises(DirectiveError) as caught:
        parse_value(text)
    assert str(caught.value) == message(problem, text, len(text) - 1)
    assert parse_value(f"{text}\\")


@pytest.mark.parametrize(
    "line", ["#STAGE /a:/b # why", "#STAGE # why", "#STAGE /a #1:/b", "#STAGE /a:/b\t# why"]
)
def test_a_comment_in_a_line_is_refused(line: str) -> None:
    problem = (
        "no comment can follow here; remove it (for a path with ' #', write it in quotes: #SBATCH "
        "'--stage=SRC:DST')"
    )
    assert line_fault(line) == message(problem, line.replace("\t", "?"), line.rindex("#"))


@settings(max_examples=300, deadline=None)
@given(DIRECTIVES)
def test_a_line_is_read_as_a_value_is(directive: Directive) -> None:
    text = str(directive)
    assume(" #" not in text and text == text.rstrip(" \t"))
    assert parse_script([BASH, f"#STAGE {text}\n"]) == (directive,)


@pytest.mark.parametrize("pattern", ["", " ", "!kept", "#comment", "\\\\"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    text = f"/a:/b,exclude={pattern}"
    with pytest.raises(DirectiveError) as caught:
        parse_value(text)
    shown = pattern.replace("\\\\", "\\")
    assert caught.value.problem == (
        f"'{shown}' is not a valid pattern; write it as in a .gitignore, but not with ! or # at "
        "its beginning"
    )
    assert caught.value.position == len("/a:/b,exclude=")


def test_patterns_may_be_given_more_than_once() -> None:
    (directive,) = parse_value("/a:/b,exclude=*.pyc,include=/lib,exclude=a\\,b")
    assert (directive.options.include, directive.options.exclude) == (("/lib",), ("*.pyc", "a,b"))
    line = r"#STAGE /a:/b,exclude=*.pyc,include=/lib,exclude=a\,b"
    assert parse_script([line]) == (directive,)


def test_extract_takes_no_value_and_is_for_archives() -> None:
    (directive,) = parse_value("/a.tar.zst:/b,extract")
    assert directive == Directive("/a.tar.zst", "/b", Options(extract=True))
    assert parse_script(["#STAGE /a.tar.zst:/b,extract"]) == (directive,)
    with pytest.raises(DirectiveError) as caught:
        parse_value("/a.tar:/b,extract=yes")
    assert (caught.value.problem, caught.value.position) == ("'extract' takes no value", 17)
    with pytest.raises(DirectiveError) as caught:
        parse_value("/a.rar:/b,extract")
    known = ".tar.gz .tgz .tar.zst .tzst .tar.xz .txz .tar.bz2 .tbz2 .tbz .tar .zip"
    assert (caught.value.problem, caught.value.position) == (
        f"'extract' needs an archive as source: {known}",
        0,
    )


def test_decompress_without_a_pattern_is_for_compressed_files() -> None:
    for suffix in (".gz", ".zst", ".xz", ".bz2", ".GZ", ".tar.gz"):
        (directive,) = parse_value(f"/a{suffix}:/b,decompress")
        assert directive == Directive(f"/a{suffix}", "/b", Options(decompress=ITSELF))
        assert parse_script([f"#STAGE /a{suffix}:/b,decompress"]) == (directive,)


def test_decompress_with_patterns_is_for_folders() -> None:
    (directive,) = parse_value("/a:/b,decompress=*.gz,decompress=/x/*")
    assert directive == Directive("/a", "/b", Options(decompress=("*.gz", "/x/*")))
    assert parse_script(["#STAGE /a:/b,decompress=*.gz,decompress=/x/*"]) == (directive,)
    assert print_value([directive]).endswith(",decompress=*.gz,decompress=/x/*")
    for options in ("decompress=*,decompress", "decompress,decompress=*", "decompress,decompress"):
        text = f"/a.gz:/b,{options}"
        column = text.rindex("decompress")
        assert value_fault(text) == message("'decompress' is given twice", text, column)
    text = "/a:/b,decompress=!x"
    assert value_fault(text).startswith("'!x' is not a valid pattern")


@pytest.mark.parametrize("source", ["/a", "/a.tgz", "/a.zip", "/gz", "/a.gz/", "/.gz", "/...xz"])
def test_only_a_compressed_file_is_decompressed(source: str) -> None:
    text = f"{source}:/b,decompress"
    problem = (
        "'decompress' needs a compressed file as source: .gz .zst .xz .bz2; for files in a folder "
        "write a pattern: decompress=*"
    )
    assert value_fault(text) == message(problem, text, 0)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ("decompress,extract", "extract"),
        ("extract,decompress", "extract"),
        ("decompress,mode=shard", "mode=shard"),
        ("mode=shard,by={n},decompress", "mode=shard"),
    ],
)
def test_what_cannot_be_combined_with_decompress_is_refused(options: str, option: str) -> None:
    text = f"/a.tar.gz:/b,{options}"
    problem = f"'{option}' cannot be combined with decompress"
    assert value_fault(text) == message(problem, text, text.index(option))


def test_decompress_may_be_combined_with_defaults() -> None:
    (directive,) = parse_value("/a.gz:/b,mode=copy,relocate=auto,decompress,share=all")
    assert directive.options == Options(decompress=ITSELF, share=Share.ALL)


# mode=shard


@pytest.mark.parametrize(
    ("text", "directive"),
    [
        ("/a:/b,mode=copy", Directive("/a", "/b")),
        ("/a:/b,mode=shard", Directive("/a", "/b", Options(mode=Mode.SHARD))),
        ("/a:/b,mode=shard,by={n}", Directive("/a", "/b", Options(mode=Mode.SHARD, by="{n}"))),
        (
            "/a:/b,by=rank{n}/,mode=shard",
            Directive("/a", "/b", Options(mode=Mode.SHARD, by="rank{n}/")),
        ),
        (
            "/a:/b,mode=shard,by=a\\,{n}",
            Directive("/a", "/b", Options(mode=Mode.SHARD, by="a,{n}")),
        ),
        (
            "/a:/b,mode=shard,relocate=auto,exclude=*.pyc",
            Directive("/a", "/b", Options(exclude=("*.pyc",), mode=Mode.SHARD)),
        ),
    ],
)
def test_a_folder_may_be_spread_over_the_nodes(text: str, directive: Directive) -> None:
    assert parse_value(text) == (directive,)


@pytest.mark.parametrize(
    ("text", "problem", "column"),
    [
        ("/a:/b,mode", "'mode' needs a value: mode=copy or shard", 6),
        ("/a:/b,mode=0644", "'0644' is not one of copy, shard", 11),
        ("/a:/b,mode=", "'' is not one of copy, shard", 11),
        ("/a:/b,mode=shard,mode=copy", "'mode' is given twice", 17),
        ("/a:/b,mode=shard,by", "'by' needs a value: by=…", 17),
        ("/a:/b,mode=shard,by={n},by={n}", "'by' is given twice", 24),
        ("/a:/b,mode=shard,by=", NO_NUMBER.format(""), 20),
        ("/a:/b,mode=shard,by=part-*", NO_NUMBER.format("part-*"), 20),
        ("/a:/b,mode=shard,by={n}-{n}", NO_NUMBER.format("{n}-{n}"), 20),
        ("/a:/b,mode=shard,by=!{n}", NO_NUMBER.format("!{n}"), 20),
        ("/a:/b,mode=shard,by=#{n}", NO_NUMBER.format("#{n}"), 20),
        ("/a:/b,by={n}", "'by' needs mode=shard", 6),
        ("/a:/b,validate=always,by={n},mode=copy", "'by' needs mode=shard", 22),
        ("/a.zip:/b,extract,mode=shard", "'extract' cannot be combined with mode=shard", 10),
        ("/a.zip:/b,mode=shard,extract", "'extract' cannot be combined with mode=shard", 21),
    ],
)
def test_a_mode_that_is_wrong_is_refused(text: str, problem: str, column: int) -> None:
    assert value_fault(text) == message(problem, text, column)


@pytest.mark.parametrize(
    ("text", "at", "problem"),
    [
        ("/a:/b,layout=hub", 6, "'layout=hub' needs a model of a hub as source: hf://…"),
        (
            "hf://o/m:/b,layout=hub,mode=shard", 23,
            "'mode=shard' cannot be combined with layout=hub",
        ),
        (
            "hf://o/m:/b,decompress=*.gz,layout=hub", 12,
            "'decompress=*.gz' cannot be combined with layout=hub",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_laid_out_as_a_hubs_cache_is_refused(
    text: str, at: int, problem: str
) -> None:
    assert value_fault(text) == message(problem, text, at)


@pytest.mark.parametrize("option", ["share=all", "share=group"])
def test_what_cannot_be_combined_with_links_that_are_followed_is_refused(option: str) -> None:
    for options in (f"links=follow,{option}", f"{option},links=follow"):
        text = f"/a:/b,{options}"
        problem = f"'{option}' cannot be combined with links=follow"
        assert value_fault(text) == message(problem, text, text.index(option))
    (directive,) = parse_value("/a:/b,links=follow,share=none,relocate=auto,mode=shard")
    assert directive.options == Options(links=Links.FOLLOW, mode=Mode.SHARD)


@pytest.mark.parametrize("name", ["weights", "_", "W2", "shards", "a" * 64])
def test_a_name_for_the_path_is_read(name: str) -> None:
    assert parse_value(f"/a:/b,as={name}") == (Directive("/a", "/b", Options(name=name)),)


@pytest.mark.parametrize(
    "name", ["", "2w", "a b", "a-b", "é", "a" * 65, "a=b", "LD_PRELOAD=/x", "$x"]
)
def test_a_name_that_no_variable_can_have_is_refused(name: str) -> None:
    text = f"/a:/b,as={name}"
    problem = (
        f"'{name}' cannot be part of a variable's name; write at most 64 letters without accents, "
        "digits and _, and no digit first"
    )
    assert value_fault(text) == message(problem, text, 9)


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_name_of_our_own_is_refused(name: str) -> None:
    text = f"/a:/b,as={name}"
    problem = f"STAGE_{name} is slurm-stage's own; choose another name"
    assert value_fault(text) == message(problem, text, 9)


def test_each_variable_of_our_own_is_reserved() -> None:
    code = [path for kind in ("stager/**/*.py", "prolog/**/*.[ch]") for path in ROOT.glob(kind)]
    used = {name for path in code for name in re.findall(r'"STAGE_([A-Z_]+)[="]', path.read_text())}
    # Those are a driver's ([shared_fs] of stage.toml), in an environment of its own.
    of_driver = {"FOLDER", "GID", "JOB", "MOUNT", "NODE", "NODES", "UID"}
    assert used - RESERVED == of_driver
    assert "FAILED_NODES" in used
