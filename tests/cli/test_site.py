"""``stagectl site``: what users may do here, from stage.toml alone."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from stager.request import policy
from stager.request.grammar import parse_value
from stager.request.resolve import resolve
from stager.request.script import sbatch_values
from tests.support.desk import NO_CONFIG, call
from tests.support.directives import NAMES
from tests.support.stagectl import STAGECTL, Ran
from tests.support.terminal import Terminal

#: Each key that users may ask for, with a value that is not its default.
EVERYTHING = """\
roots = ["/nvme", "/scratch"]
destinations = ["/nvme/users", "/scratch"]
lock_timeout = 90
allow_share = "group"
[cache]
keep_free = "2.5%"
user_limit = "200GiB"
headroom = "20GiB"
unpacked_size = "1GiB"
unpacked_members = 1000
[launch]
mpi = "pmix"
tolerate = "1%"
tolerate_limit = 4
[source]
allow = ["s3://", "docker://registry.site.org/"]
endpoints = ["https://minio.site.org:9000"]
insecure_registries = ["registry:5000"]
limit = "5GiB/s"
[shared_fs]
driver = "/usr/libexec/moosefs"
folder = "/nvme"
mount = "/mnt/stage"
[shared]
owner = "games"
roots = ["/nvme/shared"]
"""
SAID = """\
DST beneath    /nvme/users, /scratch
shared:/PATH   a DST in a filesystem made of the disks of your job's nodes
for all users  /nvme/shared: only the account games stages there
SRC            files and folders that the nodes can read
URLs           those that begin with s3://, docker://registry.site.org/
endpoints      besides the vendors': https://minio.site.org:9000
registries     nobody proves who answers: registry:5000
rate of URLs   up to 5.0 GiB/s for a job (not of images)
kept free      2.5 % of each disk
after a job    old copies of any user are removed until 20.0 GiB more than this are free
your limit     200.0 GiB of each disk of a node
unpacked       up to 1.0 GiB, and 1000 members, of one archive
share=         group
wait           up to 1 min 30 s for another job of yours with the same DST
failing nodes  1% of a job's nodes, or as --stage-tolerate says; never more than 4
set in         stage.toml
"""
DEFAULTS = """\
DST beneath    /nvme
SRC            files and folders that the nodes can read
URLs           none
kept free      5 % of each disk
your limit     60 % of each disk of a node
unpacked       up to 1.0 TiB, and 10000000 members, of one archive
share=         group, all
wait           up to 30 min 0 s for another job of yours with the same DST
failing nodes  0 of a job's nodes, or as --stage-tolerate says; never more than 50%
set in         stage.toml
"""


def site(folder: Path, config: str, *options: str) -> Ran:
    (folder / "stage.toml").write_text(config)
    return call(["site", "--config", "stage.toml", *options], folder)


def test_it_shows_all_that_the_site_sets(tmp_path: Path) -> None:
    assert site(tmp_path, EVERYTHING) == Ran(0, SAID, "")


def test_what_is_not_set_is_shown_only_if_users_may_ask(tmp_path: Path) -> None:
    assert site(tmp_path, 'roots = ["/nvme"]') == Ran(0, DEFAULTS, "")


def test_json_has_the_keys_and_bytes_of_the_file(tmp_path: Path) -> None:
    done = site(tmp_path, EVERYTHING, "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out) == {
        "version": 1,
        "config": "stage.toml",
        "roots": ["/nvme", "/scratch"],
        "destinations": ["/nvme/users", "/scratch"],
        "variables": {},
        "hints": {},
        "lock_timeout": 90.0,
        "allow_share": "group",
        "cache": {
            "keep_free": "2.5%",
            "user_limit": 200 << 30,
            "headroom": 20 << 30,
            "store": "",
            "size": 0,
            "unpacked_size": 1 << 30,
            "unpacked_members": 1000,
        },
        "source": {
            "allow": ["s3://", "docker://registry.site.org/"],
            "endpoints": ["https://minio.site.org:9000"],
            "limit": 5 << 30,
            "insecure_registries": ["registry:5000"],
        },
        "shared": {"owner": "games", "roots": ["/nvme/shared"]},
        "shared_fs": {"mount": "/mnt/stage"},
        "launch": {"tolerate": "1%", "tolerate_limit": "4"},
    }


def test_json_names_the_roots_if_users_may_stage_to_all_of_them(tmp_path: Path) -> None:
    found = json.loads(site(tmp_path, 'roots = ["/nvme", "/scratch"]', "--json").out)
    assert found["destinations"] == ["/nvme", "/scratch"]


def test_it_shows_how_to_name_the_folders_of_jobs_and_how_to_ask_for_them(tmp_path: Path) -> None:
    text = (
        'roots = ["/nvme", { path = "/local/%j", hint = "--gres=local:GB" }]\n'
        '[variables]\nTMPDIR = "/local/%j"\n'
    )
    assert site(tmp_path, text).out.startswith(
        "DST beneath    /nvme, /local/%j\n"
        "variables      $TMPDIR: /local/%j\n"
        "ask for        /local/%j by --gres=local:GB\n"
        "of one job     /local/%j: the copies there go with the job\n"
    )
    found = json.loads(site(tmp_path, text, "--json").out)
    assert found["roots"] == ["/nvme", "/local/%j"]
    assert found["variables"] == {"TMPDIR": "/local/%j"}
    assert found["hints"] == {"/local/%j": "--gres=local:GB"}


def test_no_limit_of_the_user_is_shown_where_none_applies(tmp_path: Path) -> None:
    assert "your limit" not in site(tmp_path, 'roots = [{ path = "/local/%u" }]').out
    assert "of one job" not in site(tmp_path, 'roots = [{ path = "/local/%u" }]').out


#: What a page is made from, and DST in its example, in a job that was restarted once.
PAGES = {
    "fixed-folder": ('roots = ["/nvme"]', "/nvme/alice/img.sqsh"),
    "job-folder": (
        """\
roots = [{ path = "/localscratch/%u.%j.%r", hint = "--gres=localscratch:GB" }]
[variables]
SLURM_TMPDIR = "/localscratch/%u.%j.%r"
[cache]
store = "/localscratch"
size = "200GiB"
[source]
allow = ["hf://", "s3://", "https://data.site.org/"]
""",
        "/localscratch/alice.17.1/img.sqsh",
    ),
    "private-tmp": ('roots = [{ path = "/tmp", private = true }]', "/tmp/img.sqsh"),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_for_users_has_a_line_that_the_site_allows(name: str, tmp_path: Path) -> None:
    text, destination = PAGES[name]
    done = site(tmp_path, text, "--markdown")
    assert done == Ran(0, (Path(__file__).parent / f"site/{name}.md").read_text(), "")
    rules = policy.load(tmp_path / "stage.toml")
    script = done.out.partition("```bash\n")[2]
    (value,) = sbatch_values(script.splitlines())
    letters = {"u": "alice", "j": "17", "r": "1"}
    names = replace(NAMES, letters=letters, variables=rules.variables)
    (item,) = resolve(parse_value(value, names), rules.at(letters))
    assert item.destination == destination


def test_a_folder_is_itself_on_a_page(tmp_path: Path) -> None:
    done = site(tmp_path, 'roots = ["/n_v|m*e"]', "--markdown")
    assert "| DST beneath | /n\\_v\\|m\\*e |\n" in done.out


def test_a_site_without_rules_ends_with_their_code(tmp_path: Path) -> None:
    done = call(["site", "--config", "none.toml"], tmp_path)
    assert done == Ran(3, "", f"stage: none.toml {NO_CONFIG}\n")


def test_a_folder_cannot_forge_a_line(tmp_path: Path) -> None:
    done = site(tmp_path, 'roots = ["/nvme\\nset in         /etc"]')
    assert done.out.startswith("DST beneath    /nvme?set in         /etc\n")


def test_lines_fit_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "stage.toml").write_text(EVERYTHING)
    line = [*STAGECTL, "site", "--config", f"{tmp_path}/stage.toml"]
    with Terminal(line, tmp_path, 60, variables={"PYTHONPATH": os.getcwd()}) as terminal:
        shown = terminal.until(partial(_has, "set in"))
        assert terminal.end() == 0
    start = shown.index("after a job    old copies of any user are removed until")
    assert shown[start + 1] == "               20.0 GiB more than this are free"


def _has(words: str, lines: list[str]) -> bool:
    return words in "\n".join(lines)


@pytest.mark.parametrize(
    ("size", "told"),
    [
        ("", ""),
        ("size = '10%'", "; those of all users take up to 10 %"),
        ("size = '2GiB'", "; those of all users take up to 2.0 GiB"),
    ],
)
def test_it_shows_where_copies_for_the_folders_of_jobs_stay(
    tmp_path: Path, size: str, told: str
) -> None:
    text = f'roots = ["/local/%j"]\n[cache]\nstore = "/local"\n{size}\n'
    assert site(tmp_path, text).out.startswith(
        "DST beneath    /local/%j\n"
        "of one job     /local/%j: the copies there go with the job\n"
        f"store          /local keeps copies of these for your next jobs on the node{told}\n"
    )
    found = json.loads(site(tmp_path, text, "--json").out)
    assert (found["roots"], found["cache"]["store"]) == (["/local/%j"], "/local")
