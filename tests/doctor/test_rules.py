"""What the facts of a site mean, and what to do: each rule, for each fault that it knows."""

from __future__ import annotations

import stat
from dataclasses import replace

import pytest

from stager.base.interfaces import Kind
from stager.doctor.finding import Examined, Finding, Verdict
from stager.doctor.site_rules import examine
from stager.node.facts import (
    ABSENT,
    SYSCTLS,
    UNSEEN,
    AbsentPlugin,
    Argument,
    Hello,
    NodeFacts,
    Place,
    PluginLine,
    SiteFacts,
    StoreFacts,
)
from stager.node.probes import Disk, Fabric, Link
from stager.request.policy import Cache, Launch, Policy, Shared, SharedFsSection

FOLDER, STICKY, OPEN = stat.S_IFDIR | 0o755, stat.S_IFDIR | 0o1777, stat.S_IFDIR | 0o777
OK, PROBLEM, NOTE, UNKNOWN = Verdict.OK, Verdict.PROBLEM, Verdict.NOTE, Verdict.UNKNOWN
LINE = PluginLine(
    "/opt/x/lib/spank_stage.so", "/opt/x/bin/python3", "/etc/stage.toml", "1.2.3", "24.11"
)
DISK = Disk("/nvme", "xfs", 4 << 40, 1 << 40, 1000, 900)
PORT = "OMPI_MCA_btl_tcp_port_min_v4"
IB0 = Link("ib0", Kind.INFINIBAND, 100_000, ("10.1.0.1/16",))
ETH0 = Link("eth0", Kind.ETHERNET, 10_000, ("10.0.0.1/24",), named=True)
NODE = NodeFacts(
    computes=True,
    package="1.2.3",
    prefix="/opt/x",
    digest="d1",
    sysctls=dict.fromkeys(SYSCTLS, 1),
    roots=[Place("/nvme", 0, STICKY)],
    records=[Place("/nvme/.slurm-stage", 0, FOLDER)],
    shared_roots=[Place("/nvme/all", 65534, FOLDER)],
    trusted=[Place("/etc/stage.toml", 0, stat.S_IFREG | 0o644), Place("/opt", 0, STICKY)],
    run=Place("/run/slurm-stage", 0, FOLDER),
    jobs=Place("/run/slurm-stage/jobs", 0, stat.S_IFDIR | 0o711),
    plugins=[LINE],
    peers=Place("/opt/x/lib/stage_peers.so", 0, stat.S_IFREG | 0o755),
    disks=[DISK],
    prefix_disk=replace(DISK, path="/opt/x"),
    time=1e9,
    code="c1",
    library="Open MPI 4.1.4",
    links=[IB0, ETH0],
    fabrics=[Fabric("mlx5_0", "100 Gb/sec (4X EDR)")],
    config="/etc/slurm/stage.toml",
)
SITE = SiteFacts(
    slurm={
        "PlugStackConfig": "/etc/plugstack.conf", "SlurmUser": "slurm(64)",
        "SLURM_VERSION": "24.11.5",
        "SrunPortRange": "60001-60100", "JobContainerType": "job_container/none",
    },
    partitions={"main": {"OverSubscribe": "EXCLUSIVE", "ExclusiveUser": "NO"}},
    mpi=frozenset({"pmix", "none"}),
    hello=Hello("n[1-2]", found=2),
)  # fmt: skip
POLICY = Policy(
    roots=("/nvme",),
    launch=Launch(mpi="pmix", environment={"OMPI_MCA_btl_tcp_if_include": "ib0", PORT: "41000"}),
    shared=Shared(owner="nobody", roots=("/nvme/all",)),
)

OPEN_MPI = "ranks load Open MPI 5.0.7, which needs pmix: "


def found(
    node: NodeFacts = NODE, site: SiteFacts = SITE, policy: Policy = POLICY
) -> dict[Finding, list[str]]:
    return examine(Examined(site, policy, {"n1": node}))


def news(**changes: object) -> list[tuple[Verdict, str]]:
    """What is found on a node with these other facts, and not on one where all is well."""
    usual = found()
    other = found(replace(NODE, **changes))  # type: ignore[arg-type]
    return [(one.verdict, one.line) for one in other if one not in usual]


def site_news(site: SiteFacts = SITE, **changes: object) -> list[tuple[Verdict, str]]:
    usual = found()
    other = found(NODE, site, POLICY.model_copy(update=changes))
    return [(one.verdict, one.line) for one in other if one not in usual]


def test_where_all_is_well_each_subject_is_told_as_ok() -> None:
    assert [(one.subject, one.verdict, one.line, names) for one, names in found().items()] == [
        *(("sysctl", OK, f"{name} is 1", ["n1"]) for name in SYSCTLS),
        ("roots", OK, "/nvme: users cannot move each other's files", ["n1"]),
        ("records", OK, "/nvme/.slurm-stage belongs to root", ["n1"]),
        ("shared", OK, "/nvme/all: only root and nobody can write there", ["n1"]),
        (
            "files", OK,
            "only root can write stage.toml, plugstack.conf, the prefix, the plugin", ["n1"],
        ),
        ("run", OK, "/run/slurm-stage belongs to root, and jobs are marked there", ["n1"]),
        ("plugin", OK, f"{LINE.plugin} has version 1.2.3, as this package", ["n1"]),
        ("connections", OK, "ranks accept connections from ranks of their stage alone", ["n1"]),
        ("fuse", OK, "users cannot mount filesystems (fusermount is not setuid)", ["n1"]),
        (
            "network", OK,
            "ranks use ib0 (InfiniBand, 100 Gbit/s); mlx5_0 (100 Gb/sec (4X EDR))", ["n1"],
        ),
        ("disk", OK, "/nvme (xfs, O_DIRECT, O_TMPFILE): 1.0 TiB of 4.0 TiB free", ["n1"]),
        ("shared", OK, "nobody (uid 65534) stages for all users", []),
        ("sharing", OK, "partition main: a node has jobs of one user at a time", []),
        ("ports", OK, "the ranks' ports are chosen (OMPI_MCA_btl_tcp_port_min_v4)", []),
        ("ports", OK, "srun listens on the ports 60001-60100", []),
        ("mpi", OK, "srun has the MPI plugin pmix", []),
        ("mpi", OK, "ranks load Open MPI 4.1.4, which knows pmix", ["n1"]),
        ("hello", OK, "two ranks on n[1-2] find each other by --mpi=pmix", []),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "told"),
    [
        (Place("/nvme/a", 0, STICKY), (OK, "/nvme/a belongs to root")),
        (
            Place("/nvme/a", 0, FOLDER),
            (NOTE, ("/nvme/a: users can stage only in folders of their own that you make there: "
             "chmod 1777 /nvme/a lets them make their own")),
        ),
        (
            Place("/nvme/a", 0, stat.S_IFREG | 0o644),
            (PROBLEM, ("/nvme/a is not a folder: remove it, or correct destinations in "
             "stage.toml")),
        ),
        (
            Place("/nvme/a", ABSENT, 0),
            (PROBLEM, ("/nvme/a is not there: who stages there first will own it, and nobody else "
             "can: see that its disk is mounted; then mkdir -p -m 1777 /nvme/a")),
        ),
        (
            Place("/nvme/a", 0, stat.S_IFLNK | 0o777),
            (PROBLEM, ("/nvme/a is a symbolic link, and a stage follows none: correct "
             "destinations in stage.toml")),
        ),
        (
            Place("/nvme/a", 5001, STICKY),
            (PROBLEM, ("/nvme/a belongs to uid 5001, so no other user can stage there: chown root "
             "/nvme/a; chmod 1777 /nvme/a")),
        ),
        (
            Place("/nvme/a", 0, OPEN),
            (PROBLEM, "/nvme/a: users can move each other's files: chmod +t /nvme/a"),
        ),
    ],
)  # fmt: skip
def test_a_folder_for_users_belongs_to_root(folder: Place, told: tuple[Verdict, str]) -> None:
    assert news(destinations=[folder]) == [told]


def test_users_cannot_make_a_missing_folder_in_a_root_that_is_closed_to_them() -> None:
    told = news(destinations=[Place("/nvme/a", ABSENT, 0)], roots=[Place("/nvme", 0, FOLDER)])
    remedy = "see that its disk is mounted; then mkdir -p -m 1777 /nvme/a"
    assert (PROBLEM, f"/nvme/a is not there, so nobody can stage there: {remedy}") in told


def test_the_scripts_that_were_looked_at_are_named() -> None:
    scripts = [
        Place("/opt/slurm-stage/prolog/job_prolog", 0, FOLDER),
        Place("/opt/site/epilog", UNSEEN, 0),
    ]
    files = "stage.toml, plugstack.conf, the prefix, the plugin"
    told = f"only root can write {files}, /opt/slurm-stage/prolog/job_prolog"
    assert news(scripts=scripts) == [(OK, told)]


@pytest.mark.parametrize("name", SYSCTLS)
def test_a_sysctl_that_is_off_is_a_problem(name: str) -> None:
    assert news(sysctls={**NODE.sysctls, name: 0}) == [
        (
            PROBLEM,
            f"{name} is 0: write {name} = 1 into a file of /etc/sysctl.d, and run sysctl --system",
        )
    ]
    assert news(sysctls={**NODE.sysctls, name: 2}) == [(OK, f"{name} is 2")]
    assert news(sysctls={**NODE.sysctls, name: -1}) == [(UNKNOWN, f"{name} cannot be read")]


def test_without_slurm_its_settings_are_unknown() -> None:
    texts = [
        (UNKNOWN, "Slurm does not say where plugstack.conf is"),
        (UNKNOWN, "Slurm's partitions cannot be read"),
        (UNKNOWN, "srun --mpi=list cannot be run"),
    ]
    other = found(replace(NODE, plugins=[]), SiteFacts())
    assert [(one.verdict, one.line) for one in other if one.verdict is not OK] == texts


NOT_ROOTS = "/nvme/.slurm-stage is not a folder of root's with mode 0755"
BY_OTHERS = f"{NOT_ROOTS}: remove it, and "
GIVEN_AWAY = (
    f"{NOT_ROOTS}: if it has folders of several users, chown root /nvme/.slurm-stage; else remove "
    "it, and "
)
CLOSED = (
    "/nvme: users cannot make folders or files there: see that its disk is mounted; then chmod "
    "1777 /nvme, or name the folders for them in destinations"
)
MAKE = "restart slurmd, which makes it (without the plugin, Prolog does)"


@pytest.mark.parametrize(
    ("root", "records", "expected"),
    [
        (
            Place("/nvme", 0, OPEN), NODE.records[0],
            [(PROBLEM, "/nvme: users can move each other's files: chmod +t /nvme")],
        ),
        (
            Place("/nvme", ABSENT, 0), Place("/nvme/.slurm-stage", ABSENT, 0),
            [(PROBLEM, "/nvme is not there: mount the disk, or correct roots in stage.toml")],
        ),
        (
            NODE.roots[0], Place("/nvme/.slurm-stage", ABSENT, 0),
            [(
                PROBLEM,
                "/nvme/.slurm-stage is not there, and any user could take the name: " + MAKE,
            )],
        ),
        (
            Place("/nvme", 0, FOLDER), Place("/nvme/.slurm-stage", ABSENT, 0),
            [
                (PROBLEM, CLOSED),
                (OK, "/nvme/.slurm-stage is not there yet, and only root can make it"),
            ],
        ),
        (
            NODE.roots[0], Place("/nvme/.slurm-stage", 5002, FOLDER),
            [(PROBLEM, GIVEN_AWAY + MAKE)],
        ),
        (
            NODE.roots[0], Place("/nvme/.slurm-stage", 0, OPEN),
            [(PROBLEM, f"{NOT_ROOTS}: chmod 0755 /nvme/.slurm-stage")],
        ),
        (
            NODE.roots[0], Place("/nvme/.slurm-stage", 0, stat.S_IFREG | 0o644),
            [(PROBLEM, BY_OTHERS + MAKE)],
        ),
    ],
    ids=["not sticky", "no disk", "a name to take", "not yet", "taken", "open", "a file"],
)  # fmt: skip
def test_staging_roots_and_the_records_in_them(
    root: Place, records: Place, expected: list[tuple[Verdict, str]]
) -> None:
    assert news(roots=[root], records=[records]) == expected


def test_users_need_not_write_in_a_root_where_destinations_are_named() -> None:
    closed = replace(NODE, roots=[Place("/nvme", 0, FOLDER)])
    policy = POLICY.model_copy(update={"destinations": ("/nvme/data",)})
    assert found(closed, policy=policy) == found(policy=policy)


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        (Place("/m", 0, FOLDER), (OK, "metrics.textfile: only root can write in /m")),
        (
            Place("/m", ABSENT, 0),
            (PROBLEM, "metrics.textfile: folder /m is missing: make it"),
        ),
        (
            Place("/m", 0, stat.S_IFREG | 0o644),
            (PROBLEM, "metrics.textfile: /m is not a folder: correct it in stage.toml"),
        ),
        (
            Place("/m", 990, FOLDER),
            (
                PROBLEM,
                "metrics.textfile: others than root can write in /m: chown root /m; chmod go-w /m",
            ),
        ),
        (
            Place("/m", 0, FOLDER | 0o022),
            (
                PROBLEM,
                "metrics.textfile: others than root can write in /m: chown root /m; chmod go-w /m",
            ),
        ),
        (
            Place("/m", 0, STICKY),
            (
                PROBLEM,
                "metrics.textfile: others than root can write in /m: name a folder of root's alone",
            ),
        ),
        (Place("/m", UNSEEN, 0), (UNKNOWN, "/m cannot be seen by this user")),
    ],
    ids=["root's", "missing", "a file", "of a user", "open", "as /tmp", "unseen"],
)
def test_only_root_can_write_where_the_file_for_metrics_is(
    folder: Place, expected: tuple[Verdict, str]
) -> None:
    assert news(metrics=folder) == [expected]
    assert news(metrics=folder, computes=False) == news(computes=False)


_DRIVER = Place("/usr/libexec/moosefs", 0, stat.S_IFREG | 0o755)
_NETWORK = (
    NOTE,
    (
        "MooseFS trusts its network: who has a process on a job's nodes reaches its files: "
        "see SECURITY.md"
    ),
)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (
            (_DRIVER, Place("/d", 0, FOLDER)),
            [(OK, f"{_DRIVER.path} has a folder for the jobs' data: /d"), _NETWORK],
        ),
        (
            (replace(_DRIVER, path="/own", mode=stat.S_IFREG | 0o644), Place("/d", 0, FOLDER)),
            [(
                PROBLEM,
                (
                    "the driver /own is missing, or no program: install it, or correct driver in "
                    "stage.toml"
                ),
            )],
        ),
        (
            (replace(_DRIVER, path="/own"), Place("/d", ABSENT, 0)),
            [(PROBLEM, "the folder /d is missing: make it on the node's disk, root's, 0755")],
        ),
    ],
    ids=["moosefs", "no program", "no folder"],
)  # fmt: skip
def test_what_makes_filesystems_of_the_disks_of_jobs_is_there(
    places: tuple[Place, Place], expected: list[tuple[Verdict, str]]
) -> None:
    assert news(shared_fs=[*places]) == expected
    assert news(shared_fs=[*places], computes=False) == news(computes=False)


def test_files_for_all_need_a_folder_in_which_their_account_can_write() -> None:
    text = "/nvme/all belongs to root, so nobody cannot stage there: chown nobody /nvme/all"
    assert news(shared_roots=[Place("/nvme/all", 0, FOLDER)]) == [(PROBLEM, text)]


@pytest.mark.parametrize(("owner", "mode"), [(5002, FOLDER), (65534, OPEN), (0, STICKY)])
def test_others_must_not_write_where_files_for_all_are(owner: int, mode: int) -> None:
    text = (
        "/nvme/all: others than root and nobody can write there: chown nobody /nvme/all; chmod 755 "
        "/nvme/all"
    )
    assert news(shared_roots=[Place("/nvme/all", owner, mode)]) == [(PROBLEM, text)]


def test_others_must_not_write_what_root_reads_or_runs() -> None:
    paths = [
        Place("/etc/stage.toml", 0, stat.S_IFREG | 0o666), Place("/opt/x", 5001, FOLDER),
        Place("/opt", 0, OPEN), Place("/etc/slurm", 64, FOLDER), Place("/hidden", UNSEEN, 0),
    ]  # fmt: skip
    remedy = "others than root can write it: chown root, chmod go-w"
    assert news(trusted=paths) == [
        (PROBLEM, f"/etc/stage.toml: {remedy}"),
        (PROBLEM, f"/opt/x: {remedy}"),
        (PROBLEM, f"/opt: {remedy}"),
        (UNKNOWN, "/hidden cannot be seen by this user"),
    ]


def test_the_folders_in_run_are_roots_and_made_by_slurmd() -> None:
    assert news(run=Place("/run/slurm-stage", 5001, FOLDER)) == [
        (PROBLEM, "/run/slurm-stage: others than root can write there: remove it")
    ]
    text = (
        "/run/slurm-stage/jobs is not there, so nothing is evicted and jobs are not cleaned up "
        "after: restart slurmd (without the plugin: set Prolog and Epilog)"
    )
    assert news(jobs=Place("/run/slurm-stage/jobs", ABSENT, 0)) == [(PROBLEM, text)]


def test_a_slurmd_that_was_started_without_the_plugin_is_told() -> None:
    text = "slurmd was started without the plugin, so jobs are not cleaned up after: restart slurmd"
    assert news(plugin_ended=True) == [(PROBLEM, text)]


ONCE = (
    "write one line, there or in a file that it includes: required /PATH/spank_stage.so "
    "python=/opt/x/bin/python3 "
    "config=/etc/slurm/stage.toml (without it, TaskProlog must stage)"
)
TWICE = "remove all these lines but one"
TOGETHER = "install plugin and package together (packaging/install)"


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        ([], [f"spank_stage.so is not named in /etc/plugstack.conf: {ONCE}"]),
        ([LINE, LINE], [f"spank_stage.so is named 2 times in plugstack.conf: {TWICE}"]),
        (
            [replace(LINE, version="1.2.2")],
            [f"{LINE.plugin} has version 1.2.2, this package 1.2.3: {TOGETHER}"],
        ),
        (
            [replace(LINE, version="")],
            [f"{LINE.plugin} has version unknown, this package 1.2.3: {TOGETHER}"],
        ),
        (
            [replace(LINE, python="/opt/xy/bin/python3")],
            [f"python=/opt/xy/bin/python3 in plugstack.conf is not of /opt/x: {TOGETHER}"],
        ),
    ],
    ids=["none", "twice", "another version", "no version", "another Python"],
)
def test_the_plugin_is_named_once_and_is_of_this_version(
    lines: list[PluginLine], texts: list[str]
) -> None:
    assert news(plugins=lines) == [(PROBLEM, text) for text in texts]


def test_the_arguments_of_the_plugin_are_judged() -> None:
    def line(key: str, owner: int = 0, *, given: bool = True, **how: str) -> PluginLine:
        there = Place(f"/x/{key}", owner, stat.S_IFREG | 0o755)
        return replace(LINE, arguments=(Argument(key, there, given=given, **how),))

    install = "put it there, or correct the line"
    named = "{0}=/x/{0} in plugstack.conf"
    assert news(plugins=[line("python")]) == []
    absent = [(PROBLEM, f"{named.format('python')} is not there: {install}")]
    assert news(plugins=[line("python", ABSENT)]) == absent
    assert news(plugins=[replace(line("python", ABSENT), python="/x/python")]) == absent
    default = (PROBLEM, f"python=/x/python (the default) is not there: {install}")
    assert news(plugins=[line("python", ABSENT, given=False)]) == [default]
    mistyped = replace(line("python", ABSENT, given=False), unknown=("pythn=/y",))
    fails = "so srun, sbatch and salloc fail for everybody: write python=/PATH"
    text = f"argument pythn=/y in plugstack.conf is not valid, {fails}"
    assert news(plugins=[mistyped]) == [(PROBLEM, text)]
    closed = "users cannot {} it, as {} is closed to them: chmod {} {}, or name another file"
    run = closed.format("run", "/x", "o+x", "/x")
    assert news(plugins=[line("python", UNSEEN, closed="/x")]) == [
        (PROBLEM, f"{named.format('python')}: {run}")
    ]
    read = closed.format("read", "/x/config", "o+r", "/x/config")
    assert news(plugins=[line("config", closed="/x/config")]) == [
        (PROBLEM, f"{named.format('config')}: {read}")
    ]
    assert news(plugins=[line("config", digest="d1")]) == []
    other = "is not the stage.toml that stagectl reads (/etc/slurm/stage.toml)"
    link = "make /etc/slurm/stage.toml a link to it"
    assert news(plugins=[line("config", digest="d2")]) == [
        (PROBLEM, f"{named.format('config')} {other}: {link}")
    ]


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("pythn=/a", "write python=/PATH"),
        ("config=a", "write config=/PATH"),
        ("verbose", "write python=/PATH and config=/PATH"),
    ],
)
def test_an_argument_that_the_plugin_does_not_know_is_a_problem(word: str, remedy: str) -> None:
    line, bad = replace(LINE, unknown=(word,)), f"argument {word} in plugstack.conf is not valid"
    fails = f"{bad}, so srun, sbatch and salloc fail for everybody: {remedy}"
    assert news(plugins=[line]) == [(PROBLEM, fails)]
    ignored = f"{bad}, so nothing can be staged, and --stage is an unknown option: {remedy}"
    assert news(plugins=[replace(line, required=False)]) == [(PROBLEM, ignored)]


@pytest.mark.parametrize(
    ("absent", "follows"),
    [
        (
            AbsentPlugin(LINE.plugin, required=True),
            "srun, sbatch and salloc fail for everybody, slurmd does not start, and nodes drain",
        ),
        (
            AbsentPlugin(LINE.plugin, required=False),
            "--stage is an unknown option, and jobs start without their files",
        ),
        (
            AbsentPlugin("/opt/spank_stge.so", required=True),
            "srun, sbatch and salloc fail for everybody, slurmd does not start, and nodes drain",
        ),
    ],
)
def test_a_plugin_whose_file_is_not_there_is_a_problem(absent: AbsentPlugin, follows: str) -> None:
    line = replace(LINE, version="", digest="") if absent.plugin == LINE.plugin else LINE
    text = f"{absent.plugin} in plugstack.conf is not there, so {follows}"
    remedy = "correct the path, or install the plugin there"
    assert news(plugins=[line], absent_plugins=[absent]) == [(PROBLEM, f"{text}: {remedy}")]


def test_plugstack_conf_and_the_plugin_must_be_readable_for_users() -> None:
    follows = "Slurm's commands fail for them, or know no --stage"
    unread = replace(LINE, version="", digest="")
    text = f"users cannot read {LINE.plugin}: {follows}: chmod o+r {LINE.plugin}"
    for line in (LINE, unread):  # for root, and for a user
        told = news(plugins=[line], closed={LINE.plugin: LINE.plugin})
        assert (PROBLEM, text) in told
        assert not any("unknown" in line for _, line in told)
    closed = {"/etc/plugstack.conf": "/etc/slurm"}
    assert news(plugins=[], closed=closed) == [
        (PROBLEM, ("users cannot read /etc/plugstack.conf, as /etc/slurm is closed to them: "
                   f"{follows}: chmod o+x /etc/slurm"))
    ]  # fmt: skip


def test_a_line_with_a_mistyped_first_word_is_a_problem() -> None:
    ignored = "require /opt/x/lib/spank_stage.so config=/etc/slurm/stage.toml"
    text = f"Slurm ignores this line of /etc/plugstack.conf: {ignored}"
    assert news(plugins=[], ignored_lines=[f"/etc/plugstack.conf: {ignored}"]) == [
        (PROBLEM, f"{text}: begin it with required or optional")
    ]


def test_a_plugin_without_a_path_is_not_judged() -> None:
    text = "spank_stage.so in plugstack.conf has no path, so its version is not known"
    line = replace(LINE, plugin="spank_stage.so", version="")
    assert news(plugins=[line]) == [(UNKNOWN, f"{text}: write its whole path")]


def test_filesystems_of_users_are_a_note() -> None:
    text = "users can mount filesystems by /bin/fusermount3{}: unless they need it, chmod u-s"
    assert news(fuse=["/bin/fusermount3"]) == [(NOTE, text.format(""))]
    others = ", which other users may enter (user_allow_other)"
    assert news(fuse=["/bin/fusermount3"], fuse_for_others=True) == [(NOTE, text.format(others))]


def test_a_machine_that_runs_no_jobs_has_no_disks_to_check() -> None:
    text = (
        "this is no compute node, so its disks, network and MPI were not checked: use -w NODE, or "
        "run this in a job or on a compute node"
    )
    absent = Place("/nvme", ABSENT, 0)
    assert news(computes=False, roots=[absent]) == [(NOTE, text)]


def test_a_stage_toml_or_a_version_that_differs_is_told_with_its_node() -> None:
    nodes = {"n1": NODE, "n2": NODE, "n3": replace(NODE, digest="d2"), "n4": NODE}
    findings = examine(Examined(SITE, POLICY, nodes))
    other, remedy = "is not as on the other machines", "install the same everywhere"
    assert findings[Finding("config", PROBLEM, f"stage.toml {other}", remedy)] == ["n3"]
    assert findings[Finding("version", OK, "slurm-stage is the same everywhere")] == list(nodes)
    nodes["n2"] = replace(
        NODE, code="c2", library="MPICH 4.0.0", links=[replace(IB0, speed=40_000)]
    )
    nodes["n4"] = replace(NODE, package="1.2.2")
    findings = examine(Examined(SITE, POLICY, nodes))
    assert findings[Finding("version", PROBLEM, f"slurm-stage {other}", remedy)] == ["n2", "n4"]
    assert findings[Finding("mpi", PROBLEM, f"the MPI library {other}", remedy)] == ["n2"]
    network = Finding("network", NOTE, f"the network {other}", "see to cables and drivers")
    assert findings[network] == ["n2"]


def test_a_node_without_the_plugin_s_line_is_not_said_to_have_another_plugin() -> None:
    plugin = replace(NODE, plugins=[replace(LINE, digest="p1")])
    other = "spank_stage.so is not as on the other machines"
    for nodes, told in (
        ({"n1": plugin, "n2": replace(NODE, plugins=[]), "n3": replace(NODE, plugins=[])}, []),
        ({"n1": plugin, "n2": replace(plugin, plugins=plugin.plugins * 2)}, []),  # two lines
        ({"n1": plugin, "n2": replace(plugin, plugins=[replace(LINE, digest="p2")])}, [["n2"]]),
    ):
        findings = examine(Examined(SITE, POLICY, nodes))
        assert [names for one, names in findings.items() if other in one.line] == told


def test_a_disk_must_be_larger_than_what_is_kept_free() -> None:
    text = "keep_free is 4.0 TiB, and /nvme has only 4.0 TiB, so nothing can be staged there"
    remedy = "lower keep_free in stage.toml"
    assert site_news(cache=Cache(keep_free=DISK.size)) == [(PROBLEM, f"{text}: {remedy}")]
    assert site_news(cache=Cache(keep_free=DISK.size - 1)) == []


def test_a_disk_must_be_larger_than_the_headroom() -> None:
    text = "what to keep free and headroom are 4.0 TiB, and /nvme has only 4.0 TiB, so after a job "
    text += "all copies there may go"
    remedy = "lower headroom in stage.toml"
    half = DISK.size // 2
    for cache in (
        Cache(headroom=DISK.size, keep_free=0),
        Cache(headroom=DISK.size - 9, keep_free=9),
        Cache(headroom=half, keep_free="50%"),
    ):
        assert site_news(cache=cache) == [(PROBLEM, f"{text}: {remedy}")]
    assert site_news(cache=Cache(headroom=DISK.size - 9, keep_free=8)) == []


def test_disks_of_one_kind_are_one_line_with_the_least_and_the_most_room() -> None:
    nodes = {
        "n1": NODE, "n2": replace(NODE, disks=[replace(DISK, free=2 << 40)]),
        "n3": replace(NODE, disks=[replace(DISK, free=3 << 40)]),
        "n4": replace(NODE, disks=[replace(DISK, clones=True)]),
    }  # fmt: skip
    findings = examine(Examined(SITE, POLICY, nodes))
    assert [(one.line, names) for one, names in findings.items() if one.subject == "disk"] == [
        ("/nvme (xfs, O_DIRECT, O_TMPFILE): 1.0 TiB to 3.0 TiB of 4.0 TiB free", [*nodes][:3]),
        ("/nvme (xfs, O_DIRECT, O_TMPFILE, reflink): 1.0 TiB of 4.0 TiB free", ["n4"]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "is_alone"),
    [
        ({"OverSubscribe": "NO", "ExclusiveUser": "NO"}, False),
        ({"OverSubscribe": "YES:4", "ExclusiveUser": "NO"}, False),
        ({"OverSubscribe": "NO", "ExclusiveUser": "YES"}, True),
        ({}, False),
    ],
)
def test_partitions_whose_nodes_are_shared_are_a_note(
    keys: dict[str, str], *, is_alone: bool
) -> None:
    text = (
        "partition main: users share nodes, and reach each other's ports: see SECURITY.md, or set "
        "ExclusiveUser=YES or OverSubscribe=EXCLUSIVE"
    )
    expected = [] if is_alone else [(NOTE, text)]
    assert site_news(replace(SITE, partitions={"main": keys})) == expected


def test_ports_that_the_site_did_not_choose_are_a_note() -> None:
    (ranks,) = (text for _, text in site_news(launch=Launch()) if "ports" in text)
    assert ranks == (
        "ranks listen on all interfaces, on ports from 1024 on: close the nodes' ports to other "
        "machines; OMPI_MCA_btl_tcp_port_min_v4 in [launch] environment chooses Open MPI's"
    )
    text = "srun listens on any port: set SrunPortRange, so that a firewall can tell its ports"
    site = replace(SITE, slurm={**SITE.slurm, "SrunPortRange": "0-0"})
    assert site_news(site) == [(NOTE, text)]


def test_ports_that_one_user_can_take_are_a_note() -> None:
    count = PORT.replace("min", "range")
    told = {
        number: [
            text
            for _, text in site_news(launch=Launch(environment={PORT: "1", count: number}))
            if "ports" in text and "chosen" not in text
        ]
        for number in ("100", "20000", "x")
    }
    text = (
        f"{count} = 100: who listens on so few ports stops all stages on a node: name some ten "
        "thousands"
    )
    assert told == {"100": [text], "20000": [], "x": []}


def test_ranks_that_accept_connections_from_anyone_are_a_problem() -> None:
    path = "/opt/x/lib/stage_peers.so"
    text = f"{path} is not there, by which ranks know each other: install by a "
    absent = Place(path, ABSENT, 0)
    assert news(peers=absent) == [(PROBLEM, f"{text}package or by packaging/install")]
    cannot = f"users cannot load {path}, by which ranks know each other"
    assert news(peers_closed=path) == [(PROBLEM, f"{cannot}: chmod o+r {path}")]
    folder = "/opt/x/lib"
    text = f"{cannot}, as {folder} is closed to them: chmod o+x {folder}"
    assert news(peers_closed=folder) == [(PROBLEM, text)]
    off = "ranks accept connections from anyone: set authenticate = true in [launch]"
    launch = POLICY.launch.model_copy(update={"authenticate": False})
    assert site_news(launch=launch) == [(PROBLEM, off)]


def test_an_mpi_plugin_that_slurm_lacks_is_a_problem() -> None:
    text = "srun has no MPI plugin pmi3: correct mpi in [launch] (srun --mpi=list)"
    launch = POLICY.launch.model_copy(update={"mpi": "pmi3"})
    assert (PROBLEM, text) in site_news(launch=launch)


@pytest.mark.parametrize(
    ("library", "plugin", "expected"),
    [
        ("Open MPI 5.0.7", "pmix", [(OK, "ranks load Open MPI 5.0.7, which knows pmix")]),
        ("MPICH 4.3.0", "pmi2", [(OK, "ranks load MPICH 4.3.0, which knows pmi2")]),
        ("MPICH 4.3.0", "cray_shasta", []),
        (
            "MPICH 4.3.0", "pmix",
            [(NOTE, ("ranks load MPICH 4.3.0, which may not know pmix: if they do not start, "
                     'set mpi = "auto" in [launch]'))],
        ),
        (
            "Open MPI 5.0.7", "pmi2",
            [(PROBLEM, f'{OPEN_MPI}set mpi = "auto" in [launch]')],
        ),
    ],
)  # fmt: skip
def test_the_mpi_library_must_know_the_plugin(
    library: str, plugin: str, expected: list[tuple[Verdict, str]]
) -> None:
    site = replace(SITE, mpi=frozenset({"pmix", "pmi2", "cray_shasta"}))
    policy = POLICY.model_copy(update={"launch": POLICY.launch.model_copy(update={"mpi": plugin})})
    told = found(replace(NODE, library=library), site, policy)
    assert [(one.verdict, one.line) for one in told if "ranks load" in one.text] == expected


def test_an_mpi_library_without_any_plugin_for_it_is_a_problem() -> None:
    site = replace(SITE, mpi=frozenset({"pmi2"}))
    launch = POLICY.launch.model_copy(update={"mpi": "pmi2"})
    text = (
        "ranks load Open MPI 4.1.4, which needs pmix: srun has none, so install MPICH on all nodes"
    )
    assert (PROBLEM, text) in site_news(site, launch=launch)


def test_a_node_without_an_mpi_library_is_found() -> None:
    fault = "ModuleNotFoundError: No module named 'mpi4py'"
    text = (
        f"ranks cannot load an MPI library ({fault}): install Open MPI or MPICH, and this package "
        "again if mpi4py is missing"
    )
    assert news(library="", library_fault=fault) == [(PROBLEM, text)]


LINKS = {
    "ib0": IB0,
    "eth0": ETH0,
    "eth1": replace(ETH0, name="eth1", addresses=("10.2.0.1/24",), named=False),
    "docker0": Link("docker0", Kind.VIRTUAL, 40_000, ("172.17.0.1/16",)),
    "usb0": Link("usb0", Kind.ETHERNET, 40_000, ("169.254.1.1/16",)),
    "eth9": Link("eth9", Kind.ETHERNET, 400_000),
}
ANY = {"interface": "auto"}
SLOWER = (
    NOTE,
    (
        "MPI over TCP sends also by eth0 (10 Gbit/s), and not only by ib0 (InfiniBand, "
        '100 Gbit/s): set interface = "ib0" in [launch], unless MPI does without TCP here'
    ),
)
FASTER = (
    NOTE,
    (
        "ib0 (InfiniBand, 100 Gbit/s) is faster than eth0 (10 Gbit/s), which {} names: if MPI "
        'should use it, set interface = "ib0" in [launch]'
    ),
)
ABSENT_ONE = (
    PROBLEM,
    "there is no interface {} that is up, which {} names: correct it, or see to the interface",
)
BRIDGE = (
    "MPI over TCP does not use docker0 (virtual, 40 Gbit/s), as other nodes know this one by eth0"
)
ASTRAY = (
    NOTE,
    (
        "MPI over TCP does not use eth1 (10 Gbit/s), as other nodes know this one by eth0: if it "
        "leads to them, name it (interface in [launch])"
    ),
)
VARIABLE, KEY = "OMPI_MCA_btl_tcp_if_include in [launch] environment", "interface in [launch]"


def by_variable(value: str) -> dict[str, object]:
    return {"environment": {"OMPI_MCA_btl_tcp_if_include": value}}


@pytest.mark.parametrize(
    ("links", "launch", "told"),
    [
        (["eth0"], ANY, [(OK, "ranks use eth0 (10 Gbit/s)")]),
        (["eth0", "eth1"], ANY, [(OK, "ranks use eth0 (10 Gbit/s)"), ASTRAY]),
        (["eth0", "docker0", "usb0", "eth9"], ANY,
         [(OK, "ranks use eth0 (10 Gbit/s)"), (OK, BRIDGE)]),
        (["docker0", "eth9"], ANY, []),
        (["ib0", "eth0"], ANY, [SLOWER]),
        (["ib0", "eth0"], {"interface": "ib0"},
         [(OK, "ranks use ib0 (InfiniBand, 100 Gbit/s)")]),
        (["ib0", "eth0"], {"interface": "10.1.0.0/16"},
         [(OK, "ranks use ib0 (InfiniBand, 100 Gbit/s)")]),
        (["ib0", "eth0"], {"interface": "eth0"}, [(FASTER[0], FASTER[1].format(KEY))]),
        (["ib0", "eth0"], by_variable("10.0.0.0/8,x/y"),
         [SLOWER]),
        (["ib0", "eth0"], by_variable("eth0"), [(FASTER[0], FASTER[1].format(VARIABLE))]),
        (["eth0"], by_variable("eth0,ib0"),
         [(ABSENT_ONE[0], ABSENT_ONE[1].format("ib0", VARIABLE)),
          (OK, "ranks use eth0 (10 Gbit/s)")]),
        (["eth0"], {"interface": "hsn0", **by_variable("eth0")},
         [(ABSENT_ONE[0], ABSENT_ONE[1].format("hsn0", KEY)),
          (OK, "ranks use eth0 (10 Gbit/s)")]),
        (["eth0"], {"interface": "hsn0"},
         [(ABSENT_ONE[0], ABSENT_ONE[1].format("hsn0", KEY))]),
        (["eth0"], {"interface": "10.1.0.0/16"},
         [(ABSENT_ONE[0], ABSENT_ONE[1].format("10.1.0.0/16", KEY))]),
    ],
    ids=[
        "one", "two of a speed", "others that lead nowhere", "none that leads anywhere",
        "a slower one", "the fastest is named", "its network is named", "a slower one is named",
        "networks in the variable", "a slower one in the variable", "not there, by the variable",
        "only that of the variable is there",
        "not there", "its network is not there",
    ],
)  # fmt: skip
def test_the_interface_of_the_ranks(
    links: list[str], launch: dict[str, object], told: list[tuple[Verdict, str]]
) -> None:
    node = replace(NODE, links=[LINKS[name] for name in links], fabrics=[])
    policy = POLICY.model_copy(update={"launch": Launch.model_validate(launch)})
    every = found(node, policy=policy)
    assert [(one.verdict, one.line) for one in every if one.subject == "network"] == told


def test_an_interface_of_unknown_speed_is_told_as_such() -> None:
    links = [replace(ETH0, name="vmnet", speed=0)]
    policy = POLICY.model_copy(update={"launch": Launch()})
    told = found(replace(NODE, links=links, fabrics=[Fabric("hsn0", "")]), policy=policy)
    lines = [one.line for one in told if one.subject == "network"]
    assert lines == ["ranks use vmnet (speed not known); hsn0 (rate not known)"]


@pytest.mark.parametrize(
    ("told", "verdict", "text"),
    [
        (Hello("", problem="run this in a job"), NOTE, "MPI was not tried: run this in a job"),
        (
            Hello("n[1-2]", found=1), PROBLEM,
            ("two ranks on n[1-2] do not find each other by --mpi=pmix (each is alone): correct "
             "interface, mpi or environment in [launch]; this says more: srun -w n[1-2] -N2 "
             "--mpi=pmix "
             "/opt/x/bin/python3 -c 'from mpi4py import MPI; print(MPI.COMM_WORLD.size)'"),
        ),
        (
            Hello("n1", problem="srun ended with code 1"), PROBLEM,
            ("two ranks on n1 do not find each other by --mpi=pmix (srun ended with code 1): "
             "correct interface, mpi or environment in [launch]; this says more: srun -w n1 -N1 "
             "-n2 --mpi=pmix "
             "/opt/x/bin/python3 -c 'from mpi4py import MPI; print(MPI.COMM_WORLD.size)'"),
        ),
        (
            Hello("n1", problem="n1 has no eth7", remedy="see to it"), PROBLEM,
            "two ranks on n1 do not find each other by --mpi=pmix (n1 has no eth7): see to it",
        ),
    ],
    ids=["not tried", "alone", "not started", "known"],
)  # fmt: skip
def test_two_ranks_must_find_each_other(told: Hello, verdict: Verdict, text: str) -> None:
    assert site_news(replace(SITE, hello=told)) == [(verdict, text)]
    assert site_news(replace(SITE, hello=None)) == []


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("JobContainerType", "job_container/tmpfs"), ("NamespaceType", "namespace/tmpfs"),
        ("NamespaceType", "namespace/linux"),
    ],
)  # fmt: skip
def test_a_folder_that_each_job_has_for_itself_is_to_be_called_private(key: str, kind: str) -> None:
    site = replace(SITE, slurm={**SITE.slurm, key: kind}, private=("/dev/shm", "/tmp"))

    def told(*roots: object) -> list[tuple[Verdict, str]]:
        return site_news(site, places=Policy(roots=("/nvme", *roots)).places)

    text = f"{kind} gives each job another /tmp"
    remedy = 'write [[roots]] with path = "/tmp" and private = true'
    for root in ("/tmp", "/tmp/stage"):
        assert told(root) == [(PROBLEM, f"{root}: {text}: {remedy}")]
    assert told({"path": "/tmp", "private": True}) == [(OK, f"/tmp: {text}")]
    rules = Policy(roots=({"path": "/tmp", "private": True},)).at({})  # outside of a job
    assert f"/tmp: {text}" in [one.line for one in found(site=site, policy=rules)]
    assert told("/tmpfs") == site_news(site) == []
    site = replace(site, slurm={**SITE.slurm, key: f"{key.removesuffix('Type')}/none".lower()})
    assert told("/tmp") == []


def test_a_folder_of_the_jobs_is_judged_by_who_made_it_and_how_to_ask_for_it() -> None:
    rules = Policy(roots=("/nvme", {"path": "/local/%j", "hint": "--gres=local:GB"}))
    text = "/local/%j is there in a job only: run this in a job"
    outside = found(policy=rules.at({}))
    assert [one.line for one in outside if one.verdict is NOTE and "/local" in one.line] == [text]
    for owner, line in (
        (1000, "/local/7 is there for this job or user alone"),
        (ABSENT, "/local/7 is not there: a job asks for it by --gres=local:GB"),
    ):
        node = replace(
            NODE,
            roots=[*NODE.roots, Place("/local/7", owner, FOLDER)],
            records=[*NODE.records, Place("/local/7/.slurm-stage", owner, FOLDER)],
        )
        told = [one.line for one in found(node, policy=rules.at({"j": "7"}))]
        assert [one for one in told if "/local/7" in one] == [line]


@pytest.mark.parametrize("key", ["PrologEpilogTimeout", "EpilogTimeout"])
def test_slurm_waits_for_the_clean_up_as_long_as_a_user_can_make_it_last(key: str) -> None:
    """Or it drains the node: a user could do that at will."""
    text = (
        f"{key} is 30 s: Slurm drains a node whose clean-up takes longer, and a user's process can "
        "make it last almost 50 s: set it to 50 or more, or remove it"
    )
    for value, expected in (
        ("30 sec", [(PROBLEM, text)]), ("30", [(PROBLEM, text)]),
        ("50 sec", []), ("65534", []), ("(null)", []), ("Unlimited", []),
    ):  # fmt: skip
        assert site_news(replace(SITE, slurm={**SITE.slurm, key: value})) == expected


def test_a_filesystem_of_a_job_s_disks_needs_a_prolog_on_each_node_at_once() -> None:
    shared_fs = SharedFsSection(driver="/opt/driver", folder="/nvme", mount="/mnt/stage")
    text = "PrologFlags lacks Alloc: a requeued job gets no filesystem of its disks: add Alloc to "
    lacking = [(PROBLEM, f"{text}PrologFlags in slurm.conf")]
    for flags, expected in (("(null)", lacking), ("DeferBatch", lacking), ("Alloc,Contain", [])):
        site = replace(SITE, slurm={**SITE.slurm, "PrologFlags": flags})
        assert site_news(site) == []
        assert site_news(site, shared_fs=shared_fs) == expected
    text = (
        "PrologTimeout is 30 s: Slurm drains a node whose start of a job's filesystem takes "
        "longer, and a user's process can make it last almost 50 s: set it to 50 or more, or "
        "remove it"
    )
    site = replace(SITE, slurm={**SITE.slurm, "PrologTimeout": "30 sec"})
    assert site_news(site) == []
    assert site_news(site, shared_fs=shared_fs) == [(PROBLEM, text)]


@pytest.mark.parametrize(
    ("changes", "verdict", "text"),
    [
        (
            {"kind": "nfs4"}, PROBLEM,
            ("/nvme is on nfs4, which nodes share: each would write its own copy there: name a "
             "folder on the node's own disk in stage.toml (roots)"),
        ),
        (
            {"kind": "fuse.sshfs"}, PROBLEM,
            ("/nvme is on fuse.sshfs, which nodes share: each would write its own copy there: name "
             "a folder on the node's own disk in stage.toml (roots)"),
        ),
        (
            {"fault": "Read-only file system"}, PROBLEM,
            ("/nvme: no file can be made there (Read-only file system): see to the disk, its mount "
             "and the folder's mode"),
        ),
        ({"free": 1 << 30}, NOTE, "/nvme (xfs) is almost full: 1.0 GiB of 4.0 TiB free"),
        ({"free_files": 49}, NOTE, "/nvme (xfs) is almost full: 1.0 TiB of 4.0 TiB free"),
        ({"files": 0, "free_files": 0}, OK,
         "/nvme (xfs, O_DIRECT, O_TMPFILE): 1.0 TiB of 4.0 TiB free"),
        (
            {"unnamed": False}, NOTE,
            ("/nvme (xfs) has no O_TMPFILE: what a killed stage leaves there stays until the next "
             "one"),
        ),
        (
            {"kind": "tmpfs"}, NOTE,
            "/nvme is in memory (tmpfs), which copies take: 1.0 TiB of 4.0 TiB free",
        ),
        (
            {"direct": False}, NOTE,
            "/nvme (xfs) has no O_DIRECT: copies pass through the page cache",
        ),
    ],
)  # fmt: skip
def test_a_disk_that_is_no_good_place_for_copies(
    changes: dict[str, object], verdict: Verdict, text: str
) -> None:
    told = found(replace(NODE, disks=[replace(DISK, **changes)]))  # type: ignore[arg-type]
    assert [(one.verdict, one.line) for one in told if one.subject == "disk"] == [(verdict, text)]
    assert not news(computes=False, disks=[replace(DISK, **changes)])[1:]  # type: ignore[arg-type]


def test_a_package_on_shared_storage_is_worth_a_note() -> None:
    assert news(prefix_disk=replace(DISK, kind="nfs")) == [
        (
            NOTE,
            (
                "/opt/x is on nfs: when ranks start, the node reads some 15.0 MiB there at once: "
                "install it on each node's own disk"
            ),
        )
    ]
    assert news(prefix_disk=None) == []
    shared = replace(NODE, prefix_disk=replace(DISK, kind="lustre"))
    (told,) = (
        one.text
        for one in examine(Examined(SITE, POLICY, {f"n{number}": shared for number in range(256)}))
        if one.subject == "prefix"
    )
    assert (
        told == "/opt/x is on lustre: when ranks start, 256 nodes read some 3.8 GiB there at once"
    )


def test_a_plugin_for_another_slurm_is_found() -> None:
    assert news(plugins=[replace(LINE, slurm="22.05")]) == [
        (
            PROBLEM,
            (
                f"{LINE.plugin} is built for Slurm 22.05, and this is 24.11.5, so srun, sbatch and "
                "salloc fail for everybody, slurmd does not start, and nodes drain: build it with "
                "this Slurm's headers (packaging/install)"
            ),
        )
    ]
    assert news(plugins=[replace(LINE, slurm="")]) == [], "an old plugin does not tell"


def test_a_site_without_the_plugin_needs_three_scripts() -> None:
    paths = {
        key: f"/opt/x/libexec/{name}"
        for key, name in (
            ("TaskProlog", "task_prolog"), ("Prolog", "job_prolog"), ("Epilog[0]", "job_epilog")
        )
    }  # fmt: skip
    file = stat.S_IFREG | 0o755
    scripts = [Place(path, 0, file) for path in paths.values()]
    node, site = replace(NODE, plugins=[], scripts=scripts), SITE.slurm | paths

    def told(node: NodeFacts, slurm: dict[str, str]) -> list[tuple[Verdict, str]]:
        every = found(node, replace(SITE, slurm=slurm))
        return [(one.verdict, one.line) for one in every if one.subject == "scripts"]

    well = "without the plugin, TaskProlog, Prolog and Epilog stage and clean up"
    assert told(node, site) == [(OK, well)]
    assert told(node, site | {"Prolog": "(null)"}) == [
        (PROBLEM, ("Prolog is not set, which a site without the plugin needs: "
                   "Prolog=/etc/slurm/slurm-stage/job_prolog in slurm.conf"))
    ]  # fmt: skip
    packaged = replace(node, prefix="/usr/lib/slurm-stage")
    assert told(packaged, site | {"TaskProlog": ""}) == [
        (PROBLEM, ("TaskProlog is not set, which a site without the plugin needs: "
                   "TaskProlog=/usr/lib/slurm-stage/libexec/task_prolog in slurm.conf"))
    ]  # fmt: skip
    scripts[0] = replace(scripts[0], owner=ABSENT)
    assert told(replace(node, computes=False), site) == [
        (NOTE, ("/opt/x/libexec/task_prolog is not on this machine; on a compute node without it, "
                "jobs fail or the node is drained: see that all of these have it before a job runs "
                "there"))
    ]  # fmt: skip
    scripts[2] = replace(scripts[2], mode=stat.S_IFREG | 0o644)
    assert told(node, site) == [
        (PROBLEM, ("/opt/x/libexec/task_prolog is not there: put the script there, or correct "
                   "slurm.conf")),
        (PROBLEM, ("/opt/x/libexec/job_epilog cannot be executed: chmod 755 "
                   "/opt/x/libexec/job_epilog")),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["spank_pyxis.so", "pyxis-0.24.so"])
def test_pyxis_comes_after_this_plugin(name: str) -> None:
    assert news(plugins=[replace(LINE, after=("other.so", name))]) == [
        (
            PROBLEM,
            (
                f"{name} is before spank_stage.so in plugstack.conf, so containers are "
                "started before their images are staged: list spank_stage.so first"
            ),
        )
    ]
    assert news(plugins=[replace(LINE, after=("other.so",))]) == []


@pytest.mark.parametrize(
    ("seconds", "told"), [(60, ""), (61, "61 s ahead"), (-3600, "3600 s behind")]
)
def test_a_clock_that_is_wrong_is_found(seconds: int, told: str) -> None:
    nodes = {f"n{number}": NODE for number in range(3)}
    nodes["n1"] = replace(NODE, time=NODE.time + seconds)
    nodes["login"] = replace(NODE, computes=False, time=0.0)
    clocks = [
        (one.verdict, one.line, names)
        for one, names in examine(Examined(SITE, POLICY, nodes)).items()
        if one.subject == "clock"
    ]
    text = (
        f"the clock is {told}, so ages of copies are wrong: have it set (chrony, systemd-timesyncd)"
    )
    well = (OK, "the clocks agree", ["n0", "n1", "n2"])
    assert clocks == ([(PROBLEM, text, ["n1"])] if told else [well])


NO_LOOPBACK = (
    PROBLEM,
    (
        "OMPI_MCA_btl_tcp_if_exclude in [launch] environment does not name lo, by which ranks then "
        "try to reach other nodes: add lo, or remove it, and set interface in [launch]"
    ),
)
NONE_LEFT = (
    PROBLEM,
    (
        "OMPI_MCA_btl_tcp_if_exclude in [launch] environment names every interface that leads to "
        "other nodes: remove it, and set interface in [launch]"
    ),
)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("lo,docker0", []),
        ("127.0.0.0/8,eth0", []),
        ("docker0", [NO_LOOPBACK]),
        ("lo,ib0,eth0", [NONE_LEFT]),
        ("ib0,eth0", [NO_LOOPBACK, NONE_LEFT]),
    ],
)
def test_interfaces_that_are_excluded_are_judged(
    value: str, told: list[tuple[Verdict, str]]
) -> None:
    environment = {**POLICY.launch.environment, "OMPI_MCA_btl_tcp_if_exclude": value}
    launch = POLICY.launch.model_copy(update={"environment": environment})
    policy = POLICY.model_copy(update={"launch": launch})
    problems = [one for one in found(NODE, policy=policy) if one.verdict is PROBLEM]
    assert [(one.verdict, one.line) for one in problems] == told


def test_folders_beneath_a_root_in_which_others_may_write_are_told() -> None:
    folders = [Place("/nvme/all", 0, OPEN), Place("/nvme/team", 0, stat.S_IFDIR | 0o2770)]
    refused = (
        "/nvme/all: all users may write there, so a stage to it is refused: chmod +t /nvme/all"
    )
    noted = (
        "/nvme/team: members of its group can replace what others stage there: chmod +t "
        "/nvme/team, unless that is wanted"
    )
    assert news(open_folders=folders) == [(PROBLEM, refused), (NOTE, noted)]
    named = [Place("/nvme/all", 0, stat.S_IFDIR | 0o1777)]
    assert news(open_folders=folders[:1], destinations=named) == news(destinations=named)


# The store

STORE = Place("/local", 0, FOLDER)
WITH_STORE = Policy.model_validate(
    {"roots": ["/nvme", "/local/%u.%j"], "cache": {"store": "/local"}}
)


def of_store(
    facts: StoreFacts, *more: str, policy: Policy = WITH_STORE
) -> list[tuple[Verdict, str]]:
    """What is found of a store, and of these subjects where it is concerned."""
    disk = replace(DISK, path="/local", kind=facts.kind, fault="Permission denied")
    node = replace(
        NODE, store=facts, roots=[*NODE.roots, facts.place], disks=[DISK, disk],
        records=[*NODE.records, Place("/local/.slurm-stage", 0, FOLDER)],
    )  # fmt: skip
    told = found(node, policy=policy)
    return [
        (one.verdict, one.line)
        for one in told
        if one.subject in ("store", *more) and (one.subject == "store" or "/local" in one.line)
    ]


def test_a_store_is_told_with_the_ways_from_it() -> None:
    ways = {"/local/%u.%j": "reflink", "/tmp": "copy (another mount)"}
    assert of_store(StoreFacts(STORE, "xfs", ways=ways), "roots", "disk", "records") == [
        (OK, "/local (xfs) belongs to root"),
        (OK, "copies in /local/%u.%j are made of those in /local by reflink"),
        (OK, "copies in /tmp are made of those in /local by copy (another mount)"),
        (OK, "/local/.slurm-stage belongs to root"),
    ]


#: What is told of a store, and what to do.
IS_ABSENT = (
    "/local is not there, so that each job stages anew: mount its disk, where slurmd makes it"
)
IS_OPEN = "/local: others than root can replace what is there: chown root /local; chmod go-w /local"
IS_BY_SYSTEM = "/local is on the system's own disk (ext4), which copies can fill: name a folder on "


@pytest.mark.parametrize(
    ("facts", "verdict", "told"),
    [
        (StoreFacts(Place("/local", ABSENT, 0)), PROBLEM, f"{IS_ABSENT}, or mkdir -m 755 /local"),
        (StoreFacts(Place("/local", UNSEEN, 0)), UNKNOWN, "/local cannot be seen by this user"),
        (StoreFacts(Place("/local", 5001, FOLDER), "xfs"), PROBLEM, IS_OPEN),
        (StoreFacts(Place("/local", 0, OPEN), "xfs"), PROBLEM, IS_OPEN),
        (
            StoreFacts(STORE, "ext4", by_system=True), NOTE,
            f"{IS_BY_SYSTEM}another disk, or set size in [cache]",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_store(facts: StoreFacts, verdict: Verdict, told: str) -> None:
    assert of_store(facts) == [(verdict, told)]


def test_a_store_in_memory_or_on_a_shared_disk_is_told() -> None:
    memory = of_store(StoreFacts(STORE, "tmpfs"), "disk")
    assert (
        NOTE,
        "/local is in memory (tmpfs), which copies take: 1.0 TiB of 4.0 TiB free",
    ) in memory
    shared = of_store(StoreFacts(STORE, "nfs"), "disk")
    assert any(verdict is PROBLEM and "which nodes share" in line for verdict, line in shared)


def test_a_store_that_jobs_see_another_of_is_told() -> None:
    site = replace(
        SITE, slurm={**SITE.slurm, "JobContainerType": "job_container/tmpfs"}, private=("/local",)
    )
    rules = Policy.model_validate({"roots": ["/nvme"], "cache": {"store": "/local/store"}})
    told = "/local/store: job_container/tmpfs gives each job another /local: name another folder "
    assert (PROBLEM, f"{told}as store in [cache]") in [
        (one.verdict, one.line) for one in found(site=site, policy=rules)
    ]
