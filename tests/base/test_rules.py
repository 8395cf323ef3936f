"""Root reads stage.toml as users do, with the standard library alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stager.base.errors import PolicyRefusal
from stager.base.rules import Rules, SharedFs, read_rules
from stager.request.policy import load

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "size", ["0", "5", '"5"', '"1.5GiB"', '"10 GB"', '"7k"', '"3mib"', '"2T"', '"2.5%"', '"0%"']
)
def test_root_reads_sizes_as_users_do(tmp_path: Path, size: str) -> None:
    path = tmp_path / "stage.toml"
    path.write_text(
        f'roots = ["/nvme"]\n[cache]\nkeep_free = {size}\nheadroom = {size}\nsize = {size}\n'
        'store = "/disk"\n'
        '[metrics]\ntextfile = "/run/x.prom"\n'
        '[shared]\nowner = "nobody"\nroots = ["/nvme/all"]\n'
        '[shared_fs]\ndriver = "/d"\nfolder = "/nvme"\nmount = "/mnt"\nuser = false\n'
    )
    policy, rules = load(path), read_rules(str(path))
    assert rules == Rules(
        list(policy.roots), list(policy.shared_roots), policy.cache.keep_free,
        policy.cache.headroom, policy.metrics.textfile,
        policy.shared_owner, store=policy.store, store_size=policy.cache.size,
        open_roots=list(policy.open_roots),
        shared_fs=SharedFs(**policy.shared_fs.model_dump()),
    )  # fmt: skip


@pytest.mark.parametrize(
    "size", ["1e9", "true", '"10_000"', '"8Gbit"', '"1.5"', "-1", '""', "[]", '"100%"', '"%"']
)
@pytest.mark.parametrize("key", ["keep_free", "headroom", "size"])
def test_root_accepts_the_same_sizes_as_users(tmp_path: Path, key: str, size: str) -> None:
    path = tmp_path / "stage.toml"
    path.write_text(f'roots = ["/nvme"]\n[cache]\n{key} = {size}\n')
    answers = []
    for read in (lambda: load(path), lambda: read_rules(str(path))):
        try:
            answers.append(bool(read()))
        except (PolicyRefusal, ValueError):
            answers.append(False)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("cache = 1", "cache is not a table"),
        ("[cache]\nheadroom = -1", "cache.headroom must be a number of bytes, or a text such as"),
        (
            '[cache]\nheadroom = "much"',
            "cache.headroom must be a number of bytes, or a text such as",
        ),
        (
            '[cache]\nkeep_free = "100%"',
            'cache.keep_free .* percent of a disk such as "5%"',
        ),
        ('[shared_fs]\ndriver = "d"', "shared_fs.driver is not an absolute path"),
        ('[shared_fs]\ndriver = "/d"', "shared_fs.folder is missing"),
        ('[metrics]\ntextfile = "here"', "metrics.textfile is not an absolute path"),
        ("[shared]\nroots = 1", "shared.roots is not a list of absolute paths"),
        ('[shared]\nroots = ["/"]', "shared.roots is not a list of absolute paths"),
        ('[shared]\nroots = ["/nvme/all"]', "shared.roots has no shared.owner"),
        ('[shared]\nowner = "root"', "must not be root, which cannot stage"),
        ("[shared]\nowner = 5", "this node knows no user 5; create the account"),
    ],
)
def test_a_wrong_rule_is_named_to_root(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "stage.toml"
    path.write_text(f'roots = ["/nvme"]\n{text}\n')
    with pytest.raises(ValueError, match=fault):
        read_rules(str(path))


@pytest.mark.parametrize(
    ("text", "roots"),
    [
        ('roots = ["/nvme"]', ["/nvme"]),
        (
            'roots = ["/nvme", "/scratch/local"]\n[launch]\nmpi = "pmix"',
            ["/nvme", "/scratch/local"],
        ),
        ("roots = []", []),
    ],
    ids=["one", "two and more keys", "none"],
)
def test_the_roots_are_read_from_stage_toml(tmp_path: Path, text: str, roots: list[str]) -> None:
    (tmp_path / "stage.toml").write_text(text)
    assert read_rules(f"{tmp_path}/stage.toml").roots == roots


def test_root_knows_only_the_roots_that_are_the_same_for_all(tmp_path: Path) -> None:
    path = tmp_path / "stage.toml"
    path.write_text(
        'roots = ["/nvme", "/full/100%%", "/scratch/%u.%j", { path = "/data", hint = "ask" },'
        ' { path = "/tmp", private = true }, { path = "/of/%U" }]'
    )
    assert read_rules(str(path)).roots == ["/nvme", "/full/100%", "/data"]


@pytest.mark.parametrize("store", ['""', '"/a"', '"/a/b"', '"/a/"', '"/"', '"a"', '"/a/%j"', "5"])
def test_root_accepts_the_same_store_as_users(tmp_path: Path, store: str) -> None:
    path = tmp_path / "stage.toml"
    path.write_text(f'roots = ["/nvme"]\n[cache]\nstore = {store}\n')
    roots: list[list[str] | None] = []
    for read in (lambda: load(path).roots, lambda: read_rules(str(path)).roots):
        try:
            roots.append([*read()])
        except (PolicyRefusal, ValueError):
            roots.append(None)
    assert roots[0] == roots[1]
