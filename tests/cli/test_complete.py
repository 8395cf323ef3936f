"""What Tab completes: what stagectl answers, and what bash, zsh and fish make of it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stager.base.options import OPTION_TYPES
from stager.cli import complete
from stager.cli.main import COMMANDS
from stager.store.cache import open_cache
from tests.support.desk import call
from tests.support.records import RECORD
from tests.support.stagectl import STAGECTL, Ran, environment, run

if TYPE_CHECKING:
    from pathlib import Path

JOB = {"SLURM_JOB_NODELIST": "n[1-3]"}
SHELLS = ("bash", "zsh", "fish")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with sources, a staging folder with two copies in it, and a stage.toml."""
    (tmp_path / "shared/a set").mkdir(parents=True)
    for name in ("img.sqsh", "images", "x:y", "%j", "50%", ".hidden"):
        (tmp_path / "shared" / name).touch()
    (tmp_path / "nvme/alice").mkdir(parents=True)
    (tmp_path / "nvme/file").touch()
    (tmp_path / "stage.toml").write_text(f'roots = ["{tmp_path}/nvme"]\n')
    cache = open_cache(f"{tmp_path}/nvme", os.getuid())
    for name in ("img", "a b", "c$(id)", "not\nprintable"):
        cache.save(replace(RECORD, destination=f"{tmp_path}/nvme/{name}"))
    return tmp_path


def ask(line: str, folder: Path, **variables: str) -> Ran:
    """What stagectl answers fish, which sends the whole line and the last word."""
    word = line.rpartition(" ")[2]
    asked = {"COMP_WORDS": line, "COMP_CWORD": word, "_STAGECTL_COMPLETE": "fish_complete"}
    return call([], folder, environment(**{**variables, **asked}))


def answers(line: str, folder: Path, **variables: str) -> list[str]:
    """The words that fish would offer."""
    ran = ask(line, folder, **variables)
    assert (ran.code, ran.err) == (0, "")
    words = [answer.removeprefix("plain,").partition("\t")[0] for answer in ran.out.split("\n")]
    return [word for word in words if word]


def test_commands_that_users_call_are_offered(tmp_path: Path) -> None:
    assert answers("stagectl ", tmp_path) == [name for name, (_, line) in COMMANDS.items() if line]
    assert answers("stagectl s", tmp_path) == ["site", "stage", "status"]
    assert answers("stagectl g", tmp_path) == []


def test_the_options_of_a_command_are_offered(tmp_path: Path) -> None:
    assert answers("stagectl pin -", tmp_path) == [
        "-w", "--nodes", "--job", "--hostfile", "--launcher", "--local-root", "--config",
        "--json", "-h", "--help",
    ]  # fmt: skip
    assert answers("stagectl status --by ", tmp_path) == ["node", "file", "user"]


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("-w ", ["n1", "n2", "n3"]),
        ("-w n2,", ["n2,n1", "n2,n3"]),
        ("--nodes=n2,n", ["--nodes=n2,n1", "--nodes=n2,n3"]),
        ("--nodes n2,m", []),
    ],
)
def test_the_nodes_of_the_job_are_offered(typed: str, found: list[str], tmp_path: Path) -> None:
    assert answers(f"stagectl status {typed}", tmp_path, **JOB) == found
    assert answers(f"stagectl status {typed}", tmp_path) == []


@pytest.mark.parametrize("command", ["evict", "verify", "pin", "unpin"])
def test_the_copies_on_this_node_are_offered(command: str, site: Path) -> None:
    line = f"stagectl {command} --config {site}/stage.toml"
    assert answers(f"{line} ", site) == [
        f"{site}/nvme/a b", f"{site}/nvme/c$(id)", f"{site}/nvme/img",
    ]  # fmt: skip
    assert answers(f"{line} {site}/nvme/i", site) == [f"{site}/nvme/img"]
    assert answers(f"{line} {site}/nvme/img {site}/nvme/a", site) == [f"{site}/nvme/a b"]
    assert answers(f"{line} {site}/nvme/img {site}/nvme/i", site) == []


def test_the_copies_on_simulated_nodes_are_offered(tmp_path: Path) -> None:
    (tmp_path / "nodes/node2").mkdir(parents=True)
    open_cache(f"{tmp_path}/nodes/node2", os.getuid()).save(RECORD)
    line = f"stagectl evict --local-root {tmp_path}/nodes --config {tmp_path}/none "
    assert answers(line, tmp_path) == ["/nvme/img.sqsh"]


@pytest.mark.parametrize("command", ["stage", "plan", "check"])
def test_sources_are_offered(command: str, site: Path) -> None:
    line = f"stagectl {command} --config {site}/stage.toml {site}/shared/i"
    assert answers(line, site) == [f"{site}/shared/images:", f"{site}/shared/img.sqsh:"]


@pytest.mark.parametrize(
    ("start", "found"),
    [
        ("{site}/sh", "{site}/shared/"),
        ("{site}/shared/.", "{site}/shared/.hidden:"),
        ("{site}/shared/x", "{site}/shared/x\\:y:"),
        ("{site}/shared/%", "{site}/shared/\\%j:"),
        ("{site}/shared/5", "{site}/shared/50\\%:"),
        ("/a:/b;{site}/shared/img", "/a:/b;{site}/shared/img.sqsh:"),
        ("/a:", "/a:{site}/nvme/"),
        ("/a:{site}/nvme/", "/a:{site}/nvme/alice/"),
        ("/a:/b;/a:{site}/n", "/a:/b;/a:{site}/nvme/"),
        ("s3://bucket/key:{site}/nv", "s3://bucket/key:{site}/nvme/"),
        ("docker://host:5000/name:tag:{site}/nv", "docker://host:5000/name:tag:{site}/nvme/"),
        *((start, "") for start in ("s3:", "s3://b", "docker://host:50", "/a:/etc/", "/a:b")),
    ],
)
def test_sources_and_destinations_are_offered(start: str, found: str, site: Path) -> None:
    line = f"stagectl stage --config {site}/stage.toml {start}".replace("{site}", str(site))
    assert answers(line, site) == found.replace("{site}", str(site)).split()


def test_the_options_of_a_directive_are_offered(tmp_path: Path) -> None:
    def offered(options: str) -> list[str]:
        words = answers(f"stagectl stage /a:/b,{options}", tmp_path)
        assert all(word.startswith(f"/a:/b,{options}") for word in words)
        return [word.rpartition(",")[2] for word in words]

    assert {word.partition("=")[0] for word in offered("")} == set(OPTION_TYPES)
    assert offered("v") == [
        "validate=stat", "validate=checksum", "validate=always",
        "verify=stream", "verify=readback", "via=auto", "via=link", "via=copy",
    ]  # fmt: skip
    assert offered("extract,mode=s") == ["mode=shard"]
    assert offered("extract,ex") == ["exclude="]
    assert offered("exclude=*.o,ex") == ["exclude=", "extract"]
    assert offered("de") == ["decompress", "decompress="]
    assert offered("extract;/c:/d,ex") == ["exclude=", "extract"]


def test_roots_and_files_are_offered_for_bench(site: Path) -> None:
    line = f"stagectl bench --config {site}/stage.toml"
    assert answers(f"{line} --root ", site) == [f"{site}/nvme"]
    assert ask(f"{line} --source /sh", site) == Ran(0, "file,/sh\n", "")


@pytest.mark.parametrize(
    "line",
    [
        "stagectl evict --config /dev/null ",
        "stagectl evict --config / ",
        "stagectl evict --local-root /none ",
        "stagectl status -w n",
        "stagectl stage --config /none /a:",
        "stagectl stage '",
        "stagectl stage relative",
        "stagectl stage /no/such/folder/",
        "stagectl stage /a:\\",
        "stagectl stage /a\x01",
    ],
)
@pytest.mark.parametrize("shell", SHELLS)
def test_there_is_no_message_whatever_is_wrong(shell: str, line: str, tmp_path: Path) -> None:
    asked = {"COMP_WORDS": line, "COMP_CWORD": "x", "_STAGECTL_COMPLETE": f"{shell}_complete"}
    ran = call([], tmp_path, environment(**asked, SLURM_JOB_NODELIST="n[1-"))
    assert (ran.out.strip(), ran.err) == ("", "")


def test_there_is_no_wait_for_storage_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(complete, "_LIMIT", 0.5)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(AssertionError, match=f"ended with -{int(signal.SIGALRM)} "):
        ask("stagectl evict --config fifo ", tmp_path)


def test_a_shell_that_is_not_known_gets_no_script(tmp_path: Path) -> None:
    asked = environment(_STAGECTL_COMPLETE="csh_source")
    assert call([], tmp_path, asked) == Ran(1, "", "")


def test_a_command_is_run_whatever_is_in_the_environment(site: Path) -> None:
    asked = environment(_STAGECTL_COMPLETE="bash_complete")
    line = ["check", "--config", f"{site}/stage.toml", f"/usr:{site}/nvme/b"]
    said = f"stage: ok: /usr to {site}/nvme/b (validate=stat)\n"
    assert call(line, site, asked) == Ran(0, said, "")


def test_no_command_needs_pydantic_before_it_is_run() -> None:
    modules = ", ".join(f"stager.cli.{module}" for module, line in COMMANDS.values() if line)
    check = f"import sys, {modules}; sys.exit('pydantic' in sys.modules)"
    assert run([sys.executable, "-c", check]) == Ran(0, "", "")


@pytest.fixture
def typed(site: Path) -> Path:
    """A folder for PATH with a stagectl that answers shells, and else notes its arguments."""
    program = site / "bin" / "stagectl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\n[ -z "$_STAGECTL_COMPLETE" ] || exec {" ".join(STAGECTL)}\n'
        f'for word; do printf "<%s>" "$word"; done >>{site}/typed\necho >>{site}/typed\n'
    )
    program.chmod(0o755)
    for shell in SHELLS:
        script = run([*STAGECTL], site, environment(_STAGECTL_COMPLETE=f"{shell}_source"))
        assert (script.code, script.err) == (0, "")
        (site / f"complete.{shell}").write_text(script.out)
    return site


def in_terminal(line: list[str], keys: str, site: Path) -> str:
    """Run a shell on a terminal of its own, type ``keys``, and return what it printed."""
    ours, theirs = pty.openpty()
    path = f"{site}/bin:{os.environ['PATH']}"
    variables = {**environment(**JOB), "PATH": path, "TERM": "dumb", "PYTHONPATH": os.getcwd()}
    with open(ours, "r+b", buffering=0) as terminal:
        shell = subprocess.Popen(
            line, stdin=theirs, stdout=theirs, stderr=theirs, env=variables, cwd=site
        )
        os.close(theirs)
        terminal.write(keys.encode())
        printed = b""
        try:
            while piece := terminal.read(4096):
                printed += piece
        except OSError:  # the shell has closed its end
            pass
        assert shell.wait(30) == 0, printed.decode()
    return printed.decode()


@pytest.mark.parametrize(
    ("line", "setup"),
    [
        (["bash", "--norc", "-i"], "bind 'set bell-style none'; source complete.bash"),
        (["zsh", "-f", "-i"], "autoload -Uz compinit; compinit -u -D; source complete.zsh"),
    ],
    ids=["bash", "zsh"],
)
def test_a_shell_completes_words(line: list[str], setup: str, typed: Path) -> None:
    config = f"--config {typed}/stage.toml"
    keys = [
        setup,
        "stagectl ev\t--old\t7d",
        "stagectl status -w n1,n3,\t--jso\t",
        "stagectl status --nodes=n1,n2,\t--jso\t",
        f"stagectl evict {config} {typed}/nvme/a\t{typed}/nvme/c\tend",
        f"stagectl stage {config} {typed}/shared/img\t{typed}/n\timg,ext\t--verb\t",
        f"stagectl stage {config} {typed}/shared/x\t/b,excl\ta.o",
        f"stagectl stage {config} {typed}/shared/%\t/b",
        f"stagectl check --script {typed}/shared/img\tend",
        "exit",
    ]
    printed = in_terminal(line, "".join(f"{key}\n" for key in keys), typed)
    shared, stage = f"{typed}/shared", f"<stage><--config><{typed}/stage.toml>"
    assert (typed / "typed").read_text().splitlines() == [
        "<evict><--older><7d>",
        "<status><-w><n1,n3,n2><--json>",
        "<status><--nodes=n1,n2,n3><--json>",
        f"<evict><--config><{typed}/stage.toml><{typed}/nvme/a b><{typed}/nvme/c$(id)><end>",
        f"{stage}<{shared}/img.sqsh:{typed}/nvme/img,extract><--verbose>",
        f"{stage}<{shared}/x\\:y:/b,exclude=a.o>",
        f"{stage}<{shared}/\\%j:/b>",
        f"<check><--script><{shared}/img.sqsh><end>",
    ]
    assert "Traceback" not in printed


def test_fish_completes_words(typed: Path) -> None:
    def offered(line: str) -> list[str]:
        asked = f"source complete.fish; complete --do-complete '{line}'"
        path = f"{typed}/bin:{os.environ['PATH']}"
        variables = {**environment(**JOB), "PATH": path, "PYTHONPATH": os.getcwd()}
        done = run(["fish", "--no-config", "-c", asked], typed, variables)
        assert (done.code, done.err) == (0, "")
        return [found.partition("\t")[0] for found in done.out.splitlines()]

    config = f"--config {typed}/stage.toml"
    assert offered("stagectl ev") == ["evict"]
    assert offered("stagectl status -w n1,n3,") == ["n1,n3,n2"]
    assert offered(f"stagectl evict {config} {typed}/nvme/a") == [f"{typed}/nvme/a b"]
    assert offered("stagectl stage /a:/b,ext") == ["/a:/b,extract"]
    assert offered(f"stagectl check --script {typed}/shared/img") == [f"{typed}/shared/img.sqsh"]
