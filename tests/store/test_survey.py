"""What one node finds out about a source, about its own copy, and about the place for a new one."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import DestinationError
from stager.base.options import ITSELF, Options, Validate
from stager.fs.files import digest_of
from stager.fs.partial_file import Partial
from stager.node.folders import make_folder
from stager.request.items import StageItem
from stager.source.description import SourceFacts
from stager.source.posix import look_at_source
from stager.store.cache import Cache, look_for_cache, open_cache
from stager.store.record import Record, TreeFacts
from stager.store.validity import (
    Reason,
    Survey,
    check_contents,
    judge,
    made_differently,
    open_to,
    survey,
    survey_shared,
)
from tests.support import records
from tests.support.users import (
    OWNER,
    USER,
    as_ordinary_user,
    as_user,
    on_tmpfs,
    ordinary_home,
    remount_read_only,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BYTES = b"some bytes of an image\n" * 1000
#: The xxh3-128 of BYTES.
DIGEST = "699d1a1bb1d6d2fe73e053a6cb413952"

FACTS = SourceFacts(size=10, mtime_ns=20, ctime_ns=30, inode=40)
RECORD = replace(records.RECORD, digest=DIGEST)


# Judging


def there(
    *, size: int = 10, mtime_ns: int = 20, inode: int = 50, owner: int = 60, links: int = 1,
    kind: int = stat.S_IFREG,
) -> os.stat_result:  # fmt: skip
    """A stat of the copy, by default as RECORD has it."""
    fields = (kind | 0o644, inode, 1, links, owner, 0, size, 0, 0, 0)
    return os.stat_result(fields, {"st_mtime_ns": mtime_ns})


SOURCE, COPY, REPLACED = Reason.SOURCE_CHANGED, Reason.COPY_CHANGED, Reason.REPLACED
ABSENT, NOT_RECORDED, ALWAYS = Reason.ABSENT, Reason.NOT_RECORDED, Reason.ALWAYS
#: By stat, checksum and always.
Reasons = tuple[Reason | None, Reason | None, Reason | None]
#: What is found, and why the copy is then not current by stat, checksum and always.
JUDGED: dict[
    str, tuple[SourceFacts, Record | None, os.stat_result | None, Reasons]
] = {
    "nothing changed": (FACTS, RECORD, there(), (None, None, ALWAYS)),
    "no copy": (FACTS, RECORD, None, (ABSENT,) * 3),
    "neither copy nor record": (FACTS, None, None, (ABSENT,) * 3),
    "no record": (FACTS, None, there(), (NOT_RECORDED,) * 3),
    "source: size": (
        replace(FACTS, size=11), RECORD, there(), (SOURCE, SOURCE, ALWAYS),
    ),
    "source: mtime": (
        replace(FACTS, mtime_ns=21), RECORD, there(), (SOURCE, SOURCE, ALWAYS),
    ),
    "source: ctime": (
        replace(FACTS, ctime_ns=31), RECORD, there(), (SOURCE, SOURCE, ALWAYS),
    ),
    "source: inode": (
        replace(FACTS, inode=41), RECORD, there(), (SOURCE, SOURCE, ALWAYS),
    ),
    "copy: size": (FACTS, RECORD, there(size=11), (COPY, COPY, ALWAYS)),
    "copy: mtime": (FACTS, RECORD, there(mtime_ns=21), (COPY, None, ALWAYS)),
    "copy: inode": (FACTS, RECORD, there(inode=51), (COPY, None, ALWAYS)),
    "copy: a second name": (FACTS, RECORD, there(links=2), (COPY, None, ALWAYS)),
    "copy: owner": (
        FACTS, RECORD, there(owner=61), (REPLACED, REPLACED, ALWAYS),
    ),
    "copy: a symlink": (
        FACTS, RECORD, there(kind=stat.S_IFLNK),
        (REPLACED, REPLACED, ALWAYS),
    ),
    "source and copy": (
        replace(FACTS, size=11), RECORD, there(size=11),
        (SOURCE, SOURCE, ALWAYS),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("source", "record", "copy", "reasons"), JUDGED.values(), ids=JUDGED)
def test_a_copy_is_current_or_there_is_a_reason(
    source: SourceFacts,
    record: Record | None,
    copy: os.stat_result | None,
    reasons: Reasons,
) -> None:
    modes = (Validate.STAT, Validate.CHECKSUM, Validate.ALWAYS)
    assert tuple(judge(mode, source, record, copy) for mode in modes) == reasons


def test_the_reasons_are_those_that_users_read() -> None:
    assert [str(reason) for reason in Reason] == [
        "absent",
        "what is there was not staged",
        "its record cannot be read",
        "validate=always",
        "replaced",
        "staged from another source",
        "the source changed",
        "the source changed, or other files of it are wanted",
        "the copy changed",
        "something was put into the copy",
        "it is damaged",
        "relocated differently",
        "shared differently",
        "made differently",
        "the copy has one node's part (mode=shard), all files are wanted",
        "the copy has all files, one part (mode=shard) is wanted",
        "split differently",
        "spread over other nodes",
    ]


@pytest.mark.parametrize(
    ("was", "now", "reason"),
    [
        (False, False, None),
        (True, True, None),
        (True, False, Reason.MADE_DIFFERENTLY),
        (False, True, Reason.MADE_DIFFERENTLY),
    ],
)
def test_a_copy_with_and_without_decompress_are_not_each_other(
    reason: Reason | None, *, was: bool, now: bool
) -> None:
    item = StageItem("/shared/x.gz", "/nvme/x", "/nvme", Options(decompress=ITSELF if now else ()))
    assert made_differently(item, replace(RECORD, made="decompressed" if was else "")) == reason
    assert made_differently(item, None) is None


# A node


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder of an ordinary user."""
    with ordinary_home() as folder:
        yield folder


class Node:
    """A node's disk with a copy that was staged to it, and the source."""

    def __init__(self, folder: Path) -> None:
        self.disk = folder / "disk"
        self.disk.mkdir(exist_ok=True)
        self.source = folder / "img.sqsh"
        self.source.write_bytes(BYTES)
        self.copy = self.disk / "copy.sqsh"
        self.cache: Cache = open_cache(str(self.disk), os.getuid())

    def stage(self) -> None:
        """Put the copy in place and record it."""
        source = look_at_source(str(self.source))
        partial = Partial(self.cache, direct=True)
        partial.write(memoryview(BYTES), 0)
        partial.seal(source.mode, source.group, source.facts.mtime_ns)
        copy = partial.publish(str(self.copy))
        partial.close()
        self.cache.save(
            replace(
                RECORD, source=str(self.source), destination=str(self.copy),
                source_facts=source.facts, copy_facts=copy,
            )
        )  # fmt: skip

    def survey(
        self,
        validate: Validate = Validate.STAT,
        path: Path | None = None,
        *,
        replaces: bool = False,
    ) -> Survey:
        """The node's answer."""
        path = path or self.copy
        options = Options(validate=validate, replace=replaces)
        item = StageItem(str(self.source), str(path), str(self.disk), options)
        source = look_at_source(str(self.source))
        return survey(item, str(path), source, self.cache, "n1")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


CURRENT = Survey(node="n1", reason=None, digest=DIGEST)


def needed(reason: Reason) -> Survey:
    return Survey(node="n1", reason=reason, digest="")


@pytest.mark.parametrize("validate", [Validate.STAT, Validate.CHECKSUM])
def test_a_node_with_a_staged_copy_is_current_and_answers_its_digest(
    node: Node, validate: Validate
) -> None:
    node.stage()
    answer = node.survey(validate)
    assert answer == CURRENT
    assert answer.current


@pytest.mark.parametrize("validate", [Validate.STAT, Validate.CHECKSUM])
def test_a_copy_that_was_decompressed_is_current_for_decompress_alone(
    node: Node, validate: Validate
) -> None:
    node.source = node.source.with_suffix(".gz")
    node.source.write_bytes(b"compressed")
    node.stage()
    record = node.cache.load(str(node.copy))
    assert record
    item = StageItem(str(node.source), str(node.copy), str(node.disk), Options(validate=validate))
    plain, decompressed = (
        replace(item, options=replace(item.options, decompress=chosen)) for chosen in ((), ITSELF)
    )
    source = look_at_source(str(node.source))

    def answer(item: StageItem) -> Survey:
        return survey(item, str(node.copy), source, node.cache, "n1")

    assert (answer(plain), answer(decompressed)) == (CURRENT, needed(Reason.MADE_DIFFERENTLY))
    node.cache.save(replace(record, made="decompressed"))
    assert (answer(plain), answer(decompressed)) == (needed(Reason.MADE_DIFFERENTLY), CURRENT)


def test_with_validate_always_no_node_is_current(node: Node) -> None:
    node.stage()
    answer = node.survey(Validate.ALWAYS)
    assert answer == needed(ALWAYS)
    assert not answer.current


def test_a_node_without_a_copy_needs_it_even_if_its_folders_are_missing(node: Node) -> None:
    assert node.survey() == needed(ABSENT)
    assert node.survey(path=node.disk / "a/b/copy.sqsh") == needed(ABSENT)


def _make_file(copy: Path) -> None:
    copy.write_bytes(b"mine")


def _make_link(copy: Path) -> None:
    copy.symlink_to("mine")


REMEDY = "move it, delete it, choose another destination, or add the option replace"


@pytest.mark.parametrize(
    ("make", "kind"), [(_make_file, "a plain file"), (_make_link, "a symbolic link")]
)
@pytest.mark.parametrize("validate", list(Validate))
def test_what_was_not_staged_is_not_replaced(
    node: Node, make: Callable[[Path], None], kind: str, validate: Validate
) -> None:
    make(node.copy)
    with pytest.raises(DestinationError) as caught:
        node.survey(validate)
    assert str(caught.value) == (f"{node.copy} is {kind} that was not staged; it is kept: {REMEDY}")
    assert node.survey(validate, replaces=True) == changed(Reason.NOT_RECORDED)


def test_a_file_without_a_record_is_replaced_if_it_is_like_the_source(node: Node) -> None:
    node.stage()
    node.cache.forget(str(node.copy))
    assert node.survey() == needed(Reason.NOT_RECORDED)
    os.utime(node.copy, ns=(1, 1))
    with pytest.raises(DestinationError):
        node.survey()


def test_a_file_that_looks_like_the_source_is_read_before_it_is_overwritten(
    node: Node,
) -> None:
    node.stage()
    facts = node.source.stat()
    source = look_at_source(str(node.source)).facts
    same, other = digest_of(str(node.source)), "0" * 32

    def check(digest: str) -> None:
        check_contents(str(node.copy), source, None, digest)

    check(same)
    with pytest.raises(DestinationError) as caught:
        check(other)
    assert str(caught.value) == (
        f"{node.copy} is a plain file that was not staged; it is kept: {REMEDY}"
    )
    check_contents(str(node.copy), source, node.cache.load(str(node.copy)), other)  # as staged
    os.utime(node.copy, ns=(1, 1))
    check(other)  # the survey has judged it
    node.copy.unlink()
    node.copy.mkdir()  # it has come since then: `check_unwritten` judges it
    os.utime(node.copy, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    check(other)


@pytest.mark.parametrize("validate", [Validate.STAT, Validate.CHECKSUM])
def test_a_copy_that_was_found_damaged_is_not_current(node: Node, validate: Validate) -> None:
    node.stage()
    record = node.cache.load(str(node.copy))
    assert record
    node.cache.save(record.as_damaged())
    assert node.survey(validate) == needed(Reason.DAMAGED)


def test_a_copy_that_was_shared_otherwise_is_not_current(node: Node) -> None:
    node.stage()
    record = node.cache.load(str(node.copy))
    assert record
    node.cache.save(replace(record, share="all"))
    assert node.survey() == needed(Reason.SHARED_DIFFERENTLY)


def test_a_survey_writes_nothing(node: Node) -> None:
    before = sorted(node.disk.rglob("*"))
    node.survey(path=node.disk / "a/b/copy.sqsh")
    assert sorted(node.disk.rglob("*")) == before


def _touch_source(node: Node) -> None:
    os.utime(node.source, ns=(1, 1))


def _replace_source(node: Node) -> None:
    """Another file of the same size and mtime under the same name."""
    facts = node.source.stat()
    node.source.rename(node.source.with_name("old"))
    node.source.write_bytes(BYTES.swapcase())
    os.utime(node.source, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def _touch_copy(node: Node) -> None:
    os.utime(node.copy, ns=(1, 1))


def _replace_copy(node: Node) -> None:
    facts = node.copy.stat()
    node.copy.rename(node.copy.with_name("old"))
    node.copy.write_bytes(BYTES)
    os.utime(node.copy, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def _damage_copy(node: Node) -> None:
    """Another byte in the middle, and no other trace of it but the ctime."""
    facts = node.copy.stat()
    with node.copy.open("r+b") as file:
        file.seek(len(BYTES) // 2)
        file.write(b"X")
    os.utime(node.copy, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def _link_copy(node: Node) -> None:
    node.copy.with_name("second").hardlink_to(node.copy)


def _append_to_copy(node: Node) -> None:
    with node.copy.open("ab") as file:
        file.write(b"X")


def _copy_as_symlink(node: Node) -> None:
    node.copy.rename(node.copy.with_name("moved"))
    node.copy.symlink_to("moved")


def changed(reason: Reason) -> Survey:
    return replace(needed(reason), changed=True)


#: What happens to a staged node, and what it answers then by stat and checksum.
EVENTS: list[tuple[Callable[[Node], object], tuple[Survey, Survey]]] = [
    (_touch_source, (needed(SOURCE), needed(SOURCE))),
    (_replace_source, (needed(SOURCE), needed(SOURCE))),
    (_touch_copy, (needed(COPY), CURRENT)),
    (_replace_copy, (needed(COPY), CURRENT)),
    (_damage_copy, (CURRENT, needed(Reason.DAMAGED))),
    (_link_copy, (needed(COPY), CURRENT)),
    (_append_to_copy, (changed(COPY), changed(COPY))),
    (_copy_as_symlink, (changed(REPLACED), changed(REPLACED))),
]


@pytest.mark.parametrize(
    ("change", "answers"), EVENTS, ids=[change.__name__.strip("_") for change, _ in EVENTS]
)
def test_changes_of_the_files_on_disk_are_found(
    node: Node, change: Callable[[Node], object], answers: tuple[Survey, Survey]
) -> None:
    node.stage()
    change(node)
    modes = (Validate.STAT, Validate.CHECKSUM)
    assert tuple(node.survey(mode, replaces=True) for mode in modes) == answers


@pytest.mark.parametrize(
    ("data", "digest"),
    [(b"", "99aa06d3014798d86001c324468d497f"), (BYTES, DIGEST)],
    ids=["empty", "some bytes"],
)
def test_the_digest_of_a_file_is_its_xxh3_128(tmp_path: Path, data: bytes, digest: str) -> None:
    (tmp_path / "file").write_bytes(data)
    assert digest_of(f"{tmp_path}/file") == digest


# Where nothing can be put


def refusal(node: Node, path: Path) -> str:
    with pytest.raises(DestinationError) as caught:
        node.survey(path=path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (
            lambda path: path.mkdir(),
            "a folder; write {}/ to put the file into it, or choose another destination",
        ),
        (os.mkfifo, "a named pipe; choose another destination"),
    ],
    ids=["a folder", "a named pipe"],
)
def test_a_destination_that_is_not_a_file_is_refused_by_its_kind(
    node: Node, make: Callable[[Path], object], kind: str
) -> None:
    make(node.copy)
    assert refusal(node, node.copy) == f"{node.copy} is {kind.format(node.copy)}"


NO_LINK = "links are not followed: remove it, or write the path that it leads to in the destination"
FOLDER_NEEDED = "a folder is needed there: remove it, or choose another destination"


@pytest.mark.parametrize("below", ["copy.sqsh", "a/b/copy.sqsh"])
def test_a_file_in_the_place_of_a_folder_is_refused(node: Node, below: str) -> None:
    (node.disk / "file").write_bytes(b"")
    message = f"{node.disk}/file is a plain file, not a folder; {FOLDER_NEEDED}"
    assert refusal(node, node.disk / "file" / below) == message


@pytest.mark.parametrize("target", ["nowhere", "disk", "/"])
def test_a_symlink_in_the_place_of_a_folder_is_refused(node: Node, target: str) -> None:
    (node.disk / "link").symlink_to(target)
    message = f"{node.disk}/link is a symbolic link, not a folder; {NO_LINK}"
    assert refusal(node, node.disk / "link/copy.sqsh") == message


def test_a_name_that_is_too_long_is_refused(node: Node) -> None:
    path = node.disk / ("x" * 256)
    assert refusal(node, path) == f"{path}: File name too long"


@pytest.mark.root
def test_a_folder_on_another_filesystem_than_its_root_is_refused(tmp_path: Path) -> None:
    node = Node(tmp_path)
    other = node.disk / "other"
    other.mkdir()
    message = (
        f"{other} is not on the same disk as {node.disk}, where this site stages; choose another "
        "destination"
    )
    assert on_tmpfs(other, "size=1m", lambda: refusal(node, other / "copy.sqsh")) == message


@pytest.mark.root
def test_a_read_only_disk_is_not_called_a_lack_of_permission(tmp_path: Path) -> None:
    def act() -> str:
        node = Node(tmp_path)
        remount_read_only(tmp_path)
        return refusal(node, node.disk / "copy.sqsh")

    assert on_tmpfs(tmp_path, "size=1m", act) == (
        f"{tmp_path}/disk: the disk is read-only; use other nodes (--exclude) and "
        "tell the administrator"
    )


@pytest.mark.root
def test_somebody_elses_file_is_not_replaced(node: Node) -> None:
    node.stage()
    os.chown(node.copy, USER, USER)
    message = f"{node.copy} belongs to uid {USER}; choose another destination"
    free = f"{node.copy.parent}/root"
    assert refusal(node, node.copy) == f"{message}, such as {free}/{node.copy.name}"
    os.mkdir(free)
    Path(free, node.copy.name).touch()
    assert refusal(node, node.copy) == message
    Path(free, node.copy.name).unlink()
    os.chown(free, USER, USER)
    assert refusal(node, node.copy) == message


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (0o500, "{disk}/closed: no permission to write there; choose another destination"),
        (0o600, "{disk}/closed/copy.sqsh: Permission denied"),
    ],
    ids=["no writing", "no entering"],
)
def test_a_folder_without_permission_is_refused(home: Path, mode: int, message: str) -> None:
    def act() -> str:
        node = Node(home)
        (node.disk / "closed").mkdir()
        (node.disk / "closed").chmod(mode)
        return refusal(node, node.disk / "closed/copy.sqsh")

    assert as_ordinary_user(act) == message.format(disk=home / "disk")


def test_a_staging_root_without_permission_is_the_administrators_to_open(home: Path) -> None:
    def act() -> str:
        node = Node(home)
        node.disk.chmod(0o555)
        return refusal(node, node.disk / "copy.sqsh")

    assert as_ordinary_user(act) == (
        f"{home}/disk: no permission to write there; choose another destination, or tell the "
        "administrator: users must be able to write there"
    )


# What the site's account staged for all


def share(node: Node, named: str = "") -> Survey | str:
    """A user's survey of the account's copy, or its message; of another ``named`` source."""
    item = StageItem(named or str(node.source), str(node.copy), str(node.disk), shared=True)
    source = look_at_source(str(node.source))
    try:
        return survey_shared(item, str(node.copy), source, node.cache, "n1")
    except DestinationError as error:
        return str(error)


def not_current(node: Node, why: str) -> str:
    return (
        f"{node.copy} cannot be used: only the site's account (uid {node.cache.uid}) stages files "
        f"there, for all users, and the copy is missing or not up to date ({why}); ask the "
        "administrator, or choose another destination"
    )


def test_the_copy_for_all_is_used_as_long_as_it_is_current(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stager.store.validity._PUBLICATION", ())
    assert share(node) == not_current(node, "absent")
    node.stage()
    assert share(node) == CURRENT
    node.source.write_bytes(BYTES)
    assert share(node) == not_current(node, "the source changed")
    node.stage()
    assert share(node, "/elsewhere") == not_current(node, "staged from another source")
    node.source.write_bytes(BYTES)
    assert share(node, "/elsewhere") == not_current(node, "staged from another source")
    node.cache.forget(str(node.copy))
    assert share(node) == not_current(node, "what is there was not staged")


def test_an_absent_copy_is_not_waited_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stager.store.validity._PUBLICATION", (60.0,))
    assert share(node) == not_current(node, "absent")


@pytest.mark.root
def test_a_copy_for_all_that_the_user_may_not_read_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stager.store.validity._PUBLICATION", ())
    home.chmod(0o755)
    node = Node(home)
    node.source.chmod(0o600)
    for path in (node.disk, node.source):
        os.chown(path, OWNER, OWNER)
    make_folder(str(node.disk), ".slurm-stage", OWNER, OWNER)

    def stage() -> None:
        node.cache = open_cache(str(node.disk), OWNER, shared=True)
        node.stage()
        node.source.chmod(0o644)  # the copy is as closed as its source was, whatever that is now
        record = node.cache.load(str(node.copy))
        assert record
        facts = look_at_source(str(node.source)).facts
        node.cache.save(replace(record, source_facts=facts))

    as_user(OWNER, stage)
    node.cache = look_for_cache(str(node.disk), OWNER, shared=True)
    message = (
        f"{node.copy} was staged by the site's account (uid {OWNER}), and you may not read it; "
        "choose another destination"
    )
    assert as_ordinary_user(lambda: share(node)) == message
    node.copy.chmod(0o644)
    assert as_ordinary_user(lambda: share(node)) == CURRENT


def test_a_record_that_cannot_be_read_is_a_reason(node: Node) -> None:
    node.stage()
    Path(node.cache.record_path(str(node.copy))).write_text("{}")
    assert node.survey() == needed(Reason.UNREADABLE_RECORD)
    node.copy.write_bytes(b"mine")
    message = (
        f"{node.copy} is a plain file, and its record cannot be read, so it may be yours; it is "
        "kept: move it, delete it, choose another destination, or add the option "
        "replace"
    )
    with pytest.raises(DestinationError) as caught:
        node.survey()
    assert str(caught.value) == message
    assert node.survey(replaces=True) == replace(needed(Reason.UNREADABLE_RECORD), changed=True)


def test_a_copy_that_is_being_replaced_is_waited_for(node: Node) -> None:
    node.stage()
    whole = node.cache.load(str(node.copy))
    assert whole
    node.cache.forget(str(node.copy))
    timer = threading.Timer(0.3, lambda: node.cache.save(whole))
    timer.start()
    assert share(node) == CURRENT
    timer.join()


def test_a_damaged_copy_for_all_is_found_if_a_checksum_is_asked_for(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stager.store.validity._PUBLICATION", ())
    node.stage()
    with node.copy.open("r+b") as file:
        file.write(b"damage")
    item = StageItem(
        str(node.source),
        str(node.copy),
        str(node.disk),
        Options(validate=Validate.CHECKSUM),
        shared=True,
    )
    with pytest.raises(DestinationError, match="it is damaged"):
        survey_shared(item, str(node.copy), look_at_source(item.source), node.cache, "n1")


def test_a_cache_root_may_be_the_whole_disk(node: Node) -> None:
    node.stage()
    item = StageItem(str(node.source), str(node.copy), "", Options(validate=Validate.STAT))
    source = look_at_source(str(node.source))
    assert survey(item, str(node.copy), source, node.cache, "n1").current


def test_a_changed_copy_is_found_also_where_the_source_changed(node: Node) -> None:
    node.stage()
    _touch_source(node)
    assert not node.survey().changed
    _append_to_copy(node)
    assert node.survey(replaces=True) == changed(SOURCE)


def _write_over_copy(node: Node) -> None:
    """Other bytes, as many as before."""
    node.copy.write_bytes(BYTES.swapcase())


@pytest.mark.parametrize(
    ("change", "kind", "validates"),
    [
        (_append_to_copy, "a plain file, changed since it was staged", list(Validate)),
        (_copy_as_symlink, "a symbolic link that was not staged", list(Validate)),
        (_write_over_copy, "a plain file, changed since it was staged",
         [Validate.STAT, Validate.CHECKSUM, Validate.ALWAYS]),
    ],
)  # fmt: skip
def test_a_staged_file_that_the_user_changed_is_not_replaced(
    node: Node, change: Callable[[Node], None], kind: str, validates: list[Validate]
) -> None:
    node.stage()
    change(node)
    for validate in validates:
        with pytest.raises(DestinationError) as caught:
            node.survey(validate)
        what = f"{node.copy} is {kind}; it is kept"
        assert str(caught.value) == f"{what}: {REMEDY}"
        assert node.survey(validate, replaces=True).changed


@pytest.mark.parametrize("change", [_touch_copy, _replace_copy, _damage_copy])
def test_what_loses_nothing_does_not_hinder(node: Node, change: Callable[[Node], None]) -> None:
    node.stage()
    change(node)
    assert node.survey(Validate.ALWAYS) == needed(Reason.ALWAYS)


def test_a_copy_of_the_source_that_the_user_made_does_not_hinder(node: Node) -> None:
    node.stage()
    node.source.write_bytes(b"new version")
    shutil.copy2(node.source, node.copy)
    assert node.survey() == needed(SOURCE)


def test_a_file_in_the_place_of_a_staged_folder_is_not_replaced(node: Node) -> None:
    node.stage()
    record = node.cache.load(str(node.copy))
    assert record
    node.cache.save(replace(record, tree=TreeFacts(1, 0, "0" * 32, "0" * 32)))
    node.copy.write_bytes(b"mine")
    with pytest.raises(DestinationError) as caught:
        node.survey()
    what = f"{node.copy} is a plain file that was not staged; it is kept"
    assert str(caught.value) == f"{what}: {REMEDY}"


@pytest.mark.root
def test_who_else_could_replace_a_copy_is_told_or_refused(node: Node) -> None:
    folder = node.disk / "team/own"
    folder.mkdir(parents=True)
    copy = f"{folder}/img.sqsh"
    assert open_to(copy, node.cache) == ""
    for open_folder in (folder.parent, node.disk):
        os.chown(open_folder, -1, USER)
        open_folder.chmod(0o2770)
        assert open_to(copy, node.cache) == (
            f"all members of the group gid {USER} could replace the copy, as they may write in "
            f"{open_folder}"
        )
        open_folder.chmod(0o3770)
        assert open_to(copy, node.cache) == ""
    folder.parent.chmod(0o700)
    folder.chmod(0o777)
    assert open_to(copy, node.cache) == ""  # nobody else reaches it
    folder.chmod(0o755)
    node.disk.chmod(0o777)  # the site's own folder is for doctor to judge
    said = f"all users could replace the copy, as they may write in {node.disk}"
    assert open_to(copy, node.cache) == said
    node.disk.chmod(0o1777)
    folder.parent.chmod(0o2777)
    with pytest.raises(DestinationError) as caught:
        open_to(copy, node.cache)
    assert str(caught.value) == (
        f"{folder.parent}: all users could replace what is staged there; choose another "
        "destination, or have its owner set the sticky bit (chmod +t)"
    )


def test_a_root_that_is_not_there_yet_is_open_to_nobody(tmp_path: Path) -> None:
    assert open_to(f"{tmp_path}/nvme/img", Cache(f"{tmp_path}/nvme/.slurm-stage/1")) == ""
