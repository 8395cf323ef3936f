"""What stage.toml may say, and the whole message for each way in which it can be wrong."""

from __future__ import annotations

import pwd
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError

from stager.base.errors import PolicyRefusal

# Before a test becomes another user, who may not be allowed to read the interpreter's own modules.
from stager.cli import check, main, stage  # noqa: F401
from stager.request.policy import LOCAL, Launch, Policy, Transfer, load, load_if_present
from tests.support.users import as_ordinary_user, ordinary_home

if TYPE_CHECKING:
    from collections.abc import Iterator

SHIPPED = Path(__file__).parents[2] / "slurm-config" / "stage.toml"
NO_AMOUNT = (
    'must be a number of bytes, or a text such as "10GiB", or percent of a disk such as "5%"'
)
ROOTS = 'roots = ["/nvme"]\n'
NO_NAME = "this is not a possible name of an environment variable"
NOT_PLAIN = "must be an absolute path without '.', '..' or a '/' at its end"

FULL = """
roots = ["/nvme", { path = "/scratch/%u.%j.%r", hint = "--gres=scratch:GB" }]
destinations = ["/nvme/jobs"]
lock_timeout = 2.5
allow_share = "group"
variables = { SLURM_TMPDIR = "/scratch/%u.%j.%r/tmp" }

[cache]
keep_free = "10GB"
user_limit = "2.5%"
headroom = 5
store = "/scratch"
size = "200G"
unpacked_size = "2GiB"
unpacked_members = 6

[launch]
srun = "/opt/slurm/bin/srun"
mpi = "pmi2"
start_timeout = 30
authenticate = false
interface = "10.1.0.0/16"
mpiexec = "/opt/mpich/bin/mpiexec"
agent = "ssh -p 2222"
wait = 120.5
tolerate = 2
tolerate_limit = "10%"
tolerate_slow = 20
environment = { OMPI_MCA_btl_tcp_if_include = "ib0" }

[transfer]
chunk = "1MiB"
memory = "4MiB"
algorithm = "tree"
readers = 4
writers = 2
direct = false
stall_timeout = 90.5

[source]
allow = ["s3://bucket/", "http://data.site"]
endpoints = ["https://s3.site:9000/"]
requests = 3
limit = "5GB/s"
patience = 5.5
ca_file = "/etc/site.pem"
proxy = "http://proxy:3128"
insecure_registries = ["registry:5000"]

[shared]
owner = "nobody"
roots = ["/nvme/all"]

[report]
syslog = false
job_comment = "all"

[shared_fs]
driver = "/opt/fs"
folder = "/ssd"
mount = "/mnt/stage"
user = false
[metrics]
textfile = "/var/lib/node_exporter/stage.prom"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stage.toml"


LIMIT = "must be 0 or a number of seconds from 5 on"


def refusal(path: Path) -> str:
    """The message about the file, less the remedy at the end of each."""
    with pytest.raises(PolicyRefusal) as caught:
        load(path)
    problem, remedy = str(caught.value).rsplit("; ", 1)
    assert remedy == "tell the administrator"
    return problem


def test_the_shipped_file_shows_the_defaults() -> None:
    assert load(SHIPPED) == Policy(roots=("/nvme",))


def test_the_defaults_are_these() -> None:
    assert Policy(roots=("/nvme",)).model_dump(by_alias=True) == {
        "roots": ({"path": "/nvme", "private": False, "hint": ""},),
        "destinations": (),
        "variables": {},
        "lock_timeout": 1800,
        "allow_share": "all",
        "cache": {
            "keep_free": "5%",
            "user_limit": "60%",
            "headroom": 0,
            "store": "",
            "size": 0,
            "unpacked_size": 1 << 40,
            "unpacked_members": 10_000_000,
        },
        "launch": {
            "srun": "srun",
            "mpi": "auto",
            "start_timeout": 120,
            "authenticate": True,
            "interface": "auto",
            "mpiexec": "mpiexec",
            "agent": "ssh",
            "wait": 30,
            "tolerate": "0",
            "tolerate_limit": "50%",
            "tolerate_slow": 60,
            "environment": {},
        },
        "transfer": {
            "chunk": 2_097_152,
            "memory": None,
            "algorithm": "auto",
            "readers": 0,
            "writers": 0,
            "direct": True,
            "stall_timeout": 60,
        },
        "source": {
            "allow": (),
            "endpoints": (),
            "requests": 8,
            "limit": 0,
            "patience": 60,
            "ca_file": "",
            "proxy": "",
            "insecure_registries": (),
        },
        "shared": {"owner": "", "roots": ()},
        "shared_fs": {"driver": "", "folder": "", "mount": "", "user": True},
        "report": {"syslog": True, "job_comment": "failed"},
        "metrics": {"textfile": ""},
    }


@pytest.mark.parametrize("limit", ["0", "5", "90.5"])
def test_the_limit_on_stalls_can_be_changed_and_switched_off(path: Path, limit: str) -> None:
    path.write_text(f'roots = ["/nvme"]\n[transfer]\nstall_timeout = {limit}\n')
    assert load(path).transfer.stall_timeout == float(limit)


def test_every_key_can_be_set(path: Path) -> None:
    path.write_text(FULL)
    assert load(path).model_dump(by_alias=True) == {
        "roots": (
            {"path": "/nvme", "private": False, "hint": ""},
            {"path": "/scratch/%u.%j.%r", "private": True, "hint": "--gres=scratch:GB"},
        ),
        "destinations": ("/nvme/jobs",),
        "variables": {"SLURM_TMPDIR": "/scratch/%u.%j.%r/tmp"},
        "lock_timeout": 2.5,
        "allow_share": "group",
        "cache": {
            "keep_free": 10_000_000_000,
            "user_limit": "2.5%",
            "headroom": 5,
            "store": "/scratch",
            "size": 200_000_000_000,
            "unpacked_size": 2 << 30,
            "unpacked_members": 6,
        },
        "launch": {
            "srun": "/opt/slurm/bin/srun",
            "mpi": "pmi2",
            "start_timeout": 30,
            "authenticate": False,
            "interface": "10.1.0.0/16",
            "mpiexec": "/opt/mpich/bin/mpiexec",
            "agent": "ssh -p 2222",
            "wait": 120.5,
            "tolerate": "2",
            "tolerate_limit": "10%",
            "tolerate_slow": 20,
            "environment": {"OMPI_MCA_btl_tcp_if_include": "ib0"},
        },
        "transfer": {
            "chunk": 1_048_576,
            "memory": 4_194_304,
            "algorithm": "tree",
            "readers": 4,
            "writers": 2,
            "direct": False,
            "stall_timeout": 90.5,
        },
        "source": {
            "allow": ("s3://bucket/", "http://data.site"),
            "endpoints": ("https://s3.site:9000",),
            "requests": 3,
            "limit": 5_000_000_000,
            "patience": 5.5,
            "ca_file": "/etc/site.pem",
            "proxy": "http://proxy:3128",
            "insecure_registries": ("registry:5000",),
        },
        "shared": {"owner": "nobody", "roots": ("/nvme/all",)},
        "shared_fs": {"driver": "/opt/fs", "folder": "/ssd", "mount": "/mnt/stage", "user": False},
        "report": {"syslog": False, "job_comment": "all"},
        "metrics": {"textfile": "/var/lib/node_exporter/stage.prom"},
    }


@pytest.mark.parametrize(
    ("written", "named"),
    [("auto", ""), ("hsn0", "hsn0"), ("10.1.0.0/16", "10.1.0.0/16"), ("fd00::/8", "fd00::/8")],
)
def test_the_interface_can_be_named_by_itself_or_by_its_network(
    path: Path, written: str, named: str
) -> None:
    path.write_text(f'{ROOTS}[launch]\ninterface = "{written}"\n')
    launch = load(path).launch
    assert launch.named_interface == named
    assert launch.interfaces == ("interface in [launch]", named)


@pytest.mark.parametrize(
    "written", ["", "a b", "ib0,ib1", "sixteen-letters-", "10.1.0.1/16", "10.1.0.0/33", "::1", "/"]
)
def test_an_interface_is_one_name_or_one_network(path: Path, written: str) -> None:
    path.write_text(f'{ROOTS}[launch]\ninterface = "{written}"\n')
    assert refusal(path) == (
        f'{path}: launch.interface: must be "auto", the name of an interface such as "hsn0", or '
        'a network such as "10.1.0.0/16", with the address of the network itself'
    )


@pytest.mark.parametrize(
    ("chunk", "memory", "depth"), [(2, 32, 16), (2, 5, 2), (4, 4, 2), (1024, 1, 2), (1, 100, 100)]
)
def test_the_ring_has_the_chunks_that_fit_but_two(chunk: int, memory: int, depth: int) -> None:
    sizes = {"chunk": f"{chunk}MiB", "memory": f"{memory}MiB"}
    assert Policy.model_validate({"roots": ["/nvme"], "transfer": sizes}).transfer.depth == depth


def test_by_default_the_ring_is_as_deep_as_the_ranks_see_fit(path: Path) -> None:
    path.write_text(f'{ROOTS}[transfer]\nmemory = "auto"\n')
    assert load(path).transfer.depth == Policy(roots=("/nvme",)).transfer.depth == 0


def test_a_policy_cannot_be_changed() -> None:
    policy = Policy(roots=("/nvme",))
    with pytest.raises(ValidationError, match="Instance is frozen"):
        policy.lock_timeout = 1  # type: ignore[misc]


def test_without_a_site_everything_lies_beneath_the_simulated_disks() -> None:
    assert (LOCAL.roots, LOCAL.launch, LOCAL.transfer) == (("",), Launch(), Transfer())


@pytest.mark.parametrize(
    ("chunk", "count"),
    [
        ("131072", 131_072),
        ('"128KiB"', 131_072),
        ('"1 MiB"', 1_048_576),
        ('"4.096MB"', 4_096_000),
        ('"1GiB"', 1_073_741_824),
    ],
)
def test_a_chunk_is_bytes_or_a_text_with_a_unit(path: Path, chunk: str, count: int) -> None:
    path.write_text(f"{ROOTS}[transfer]\nchunk = {chunk}\n")
    assert load(path).transfer.chunk == count


@pytest.mark.parametrize("key", ["readers", "writers"])
@pytest.mark.parametrize(("value", "count"), [('"auto"', 0), ("1", 1), ("64", 64)])
def test_readers_and_writers_are_a_number_or_auto(
    path: Path, key: str, value: str, count: int
) -> None:
    path.write_text(f"{ROOTS}[transfer]\n{key} = {value}\n")
    assert load(path).transfer.model_dump() == {**Transfer().model_dump(), key: count}


def test_an_absent_file_is_refused(path: Path) -> None:
    with pytest.raises(PolicyRefusal) as caught:
        load(path)
    assert str(caught.value) == (
        f"{path} is missing; tell the administrator (slurm-config/stage.toml is a template for it)"
    )


def test_where_a_site_may_have_no_file_an_absent_one_is_no_policy(path: Path) -> None:
    assert load_if_present(path) is None
    path.write_text(ROOTS)
    assert load_if_present(path) == Policy(roots=("/nvme",))


def test_a_folder_in_the_file_s_place_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} cannot be read: Is a directory"


def test_a_path_beneath_a_plain_file_is_refused(path: Path) -> None:
    path.touch()
    assert refusal(path / "stage.toml") == f"{path}/stage.toml cannot be read: Not a directory"


@pytest.fixture
def closed() -> Iterator[Path]:
    """A stage.toml that an ordinary user may not read."""
    with ordinary_home() as home:
        path = home / "stage.toml"
        path.write_text(ROOTS)
        path.chmod(0)
        yield path


def test_a_file_that_the_user_may_not_read_is_refused(closed: Path) -> None:
    with pytest.raises(PolicyRefusal) as caught:
        as_ordinary_user(lambda: load_if_present(closed))
    assert str(caught.value) == (
        f"{closed} cannot be read: Permission denied; tell the administrator"
    )


@pytest.mark.parametrize(
    "command",
    [
        [*command, "/a:/nvme/b"]
        for command in (["check"], ["plan", "--local=2"], ["stage", "--local=2"])
    ],
    ids=["check", "plan", "stage"],
)
def test_stagectl_takes_such_a_file_for_the_administrator_s_fault(
    closed: Path, command: list[str]
) -> None:
    def act() -> None:
        main.cli.main([*command, "--config", str(closed)], standalone_mode=False)

    with pytest.raises(PolicyRefusal) as caught:
        as_ordinary_user(act)
    assert caught.value.code == 3
    assert str(caught.value) == (
        f"{closed} cannot be read: Permission denied; tell the administrator"
    )


def test_a_file_that_is_not_utf_8_is_refused(path: Path) -> None:
    path.write_bytes(b'roots = ["/nvm\xe9"]\n')
    assert refusal(path) == (
        f"{path} is not TOML: 'utf-8' codec can't decode byte 0xe9 in position 14: "
        "invalid continuation byte"
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("roots", "Expected '=' after a key in a key/value pair (at end of document)"),
        ("roots =", "Invalid value (at end of document)"),
        ("roots = [\n", "Invalid value (at end of document)"),
        ("roots = /nvme\n", "Invalid value (at line 1, column 9)"),
        (f"{ROOTS}{ROOTS}", "Cannot overwrite a value (at line 2, column 18)"),
    ],
)
def test_a_file_that_is_not_toml_is_refused(path: Path, text: str, fault: str) -> None:
    path.write_text(text)
    assert refusal(path) == f"{path} is not TOML: {fault}"


def test_a_number_without_end_is_refused(path: Path) -> None:
    path.write_text("lock_timeout = " + "9" * 5000)
    assert refusal(path) == (
        f"{path} is not TOML: Exceeds the limit (4300 digits) for integer string conversion: "
        "value has 5000 digits; use sys.set_int_max_str_digits() to increase the limit"
    )


def test_a_file_that_is_nested_without_end_is_refused(path: Path) -> None:
    path.write_text("roots = " + "[" * 100_000)
    assert refusal(path) == f"{path} is not TOML: it is nested too deeply"


@pytest.mark.parametrize(
    ("text", "key", "near"),
    [
        (f"{ROOTS}lock_timout = 1", "lock_timout", "did you mean lock_timeout? "),
        (f"{ROOTS}Roots = []", "Roots", "did you mean roots? "),
        (f"{ROOTS}[launcher]\nmpi = 'pmix'", "launcher", "did you mean launch? "),
        (f"{ROOTS}[cache]\nuserlimit = 1", "cache.userlimit", "did you mean user_limit? "),
        (f"{ROOTS}[launch]\nnodes = 1", "launch.nodes", ""),
        (f"{ROOTS}[transfer]\nroots = []", "transfer.roots", ""),
    ],
)
def test_an_unknown_key_is_refused(path: Path, text: str, key: str, near: str) -> None:
    path.write_text(text)
    assert refusal(path) == f"{path}: {key}: unknown key; {near}stage.toml(5) lists all"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[metrics]\ntextfile = "stage.prom"', f'metrics.textfile: {NOT_PLAIN}, or ""'),
        ('[metrics]\ntextfile = "/a/"', f'metrics.textfile: {NOT_PLAIN}, or ""'),
        ('[source]\nca_file = "ca.pem"', f'source.ca_file: {NOT_PLAIN}, or ""'),
        (
            '[source]\nproxy = "proxy:80"',
            'source.proxy: must begin with https:// or http://, or be ""',
        ),
    ],
)
def test_what_may_be_left_empty_has_one_fault(path: Path, text: str, told: str) -> None:
    path.write_text(f"{ROOTS}{text}\n")
    assert refusal(path) == f"{path}: {told}"


def test_a_file_without_roots_is_refused(path: Path) -> None:
    path.write_text("lock_timeout = 1\n")
    assert refusal(path) == f"{path}: roots: is missing"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("roots = []", "roots: must name at least one folder"),
        ('roots = "/nvme"', "roots: must be a list"),
        ("roots = {}", "roots: must be a list"),
        (f"{ROOTS}launch = 3", "launch: must be a table"),
        (f"{ROOTS}transfer = [8]", "transfer: must be a table"),
    ],
)
def test_a_list_or_table_that_is_none_is_told_in_toml_s_words(
    path: Path, text: str, fault: str
) -> None:
    path.write_text(text)
    assert refusal(path) == f"{path}: {fault}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("allow_share = false", "allow_share: Input should be 'none', 'group' or 'all'"),
        ('lock_timeout = "soon"', "lock_timeout: Input should be a valid number"),
        ('lock_timeout = "10"', "lock_timeout: Input should be a valid number"),
        ("lock_timeout = true", "lock_timeout: Input should be a valid number"),
        ("lock_timeout = 1979-05-27", "lock_timeout: Input should be a valid number"),
        ("[launch]\nsrun = 5", "launch.srun: Input should be a valid string"),
        ("[launch]\nmpi = []", "launch.mpi: Input should be a valid string"),
        ("[launch.environment]\nA = 1", "launch.environment.A: Input should be a valid string"),
        *(
            (
                f"[transfer]\n{key} = {value}",
                f'transfer.{key}: must be "auto" or a number from 1 to 64',
            )
            for key in ("readers", "writers")
            for value in ('"8"', "8.0", "true", "0", "65")
        ),
        ('[transfer]\ndirect = "no"', "transfer.direct: Input should be a valid boolean"),
        (
            '[transfer]\nalgorithm = "rsync"',
            "transfer.algorithm: Input should be 'auto', 'bcast', 'ibcast', 'chain' or 'tree'",
        ),
        (
            '[cache]\nuser_limit = "all"',
            f"cache.user_limit: {NO_AMOUNT}",
        ),
        (
            '[transfer]\nchunk = "much"',
            "transfer.chunk: could not parse value and unit from byte string",
        ),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(path: Path, text: str, fault: str) -> None:
    path.write_text(f"{ROOTS}{text}\n")
    assert refusal(path) == f"{path}: {fault}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("lock_timeout = 0", "lock_timeout: Input should be greater than 0"),
        ("lock_timeout = -1.5", "lock_timeout: Input should be greater than 0"),
        ("lock_timeout = inf", "lock_timeout: Input should be a finite number"),
        ("lock_timeout = nan", "lock_timeout: Input should be a finite number"),
        (
            '[source]\nallow = ["ftp://host/"]',
            (
                "source.allow.0: must begin with one of az://, s3://, gs://, hf://, https://, "
                "http://, docker://"
            ),
        ),
        (
            '[source]\ninsecure_registries = ["registry"]',
            (
                "source.insecure_registries.0: must be a host with a '.' or a port, such as "
                "registry.site.org:5000"
            ),
        ),
        (
            '[source]\nlimit = "1kB/s"',
            "source.limit: must be 0 or at least 1000000 bytes a second",
        ),
        (
            '[source]\nlimit = "5Gb/min"',
            'source.limit: must be a number of bytes a second, or a text such as "5GB/s"',
        ),
        (
            '[source]\nendpoints = ["s3.site"]',
            "source.endpoints.0: must begin with https:// or http://",
        ),
        ("[transfer]\nstall_timeout = 4.9", f"transfer.stall_timeout: {LIMIT}"),
        ("[transfer]\nstall_timeout = -1", f"transfer.stall_timeout: {LIMIT}"),
        ("[transfer]\nstall_timeout = inf", f"transfer.stall_timeout: {LIMIT}"),
        ("[transfer]\nstall_timeout = nan", f"transfer.stall_timeout: {LIMIT}"),
        ("[transfer]\nstall_timeout = true", f"transfer.stall_timeout: {LIMIT}"),
        ('[transfer]\nstall_timeout = "1m"', f"transfer.stall_timeout: {LIMIT}"),
        ("[launch]\nstart_timeout = 0", "launch.start_timeout: Input should be greater than 0"),
        ("[launch]\nsrun = ''", "launch.srun: must be a name, or a path that starts with /"),
        ("[launch]\nsrun = 'b/srun'", "launch.srun: must be a name, or a path that starts with /"),
        ("[launch]\nmpi = ''", "launch.mpi: String should have at least 1 character"),
        ("[launch]\nmpiexec = ''", "launch.mpiexec: String should have at least 1 character"),
        ("[launch]\nagent = ' '", "launch.agent: must name a program"),
        (
            '[launch]\nagent = "ssh \'"',
            "launch.agent: cannot be read as a command: No closing quotation",
        ),
        ("[launch]\nwait = -1", "launch.wait: Input should be greater than or equal to 0"),
        (
            "[launch]\ntolerate = 1.5",
            'launch.tolerate: must be a number of nodes, or a share of them such as "10%"',
        ),
        (
            '[launch]\ntolerate_limit = "101%"',
            'launch.tolerate_limit: must be a number of nodes, or a share of them such as "10%"',
        ),
        ("[launch]\nstart_timeout = inf", "launch.start_timeout: Input should be a finite number"),
        (
            "[transfer]\nchunk = 131071",
            "transfer.chunk: Input should be greater than or equal to 131072",
        ),
        ('[transfer]\nchunk = "1MB"', "transfer.chunk: must be a multiple of 4096"),
        (
            '[transfer]\nchunk = "1025MiB"',
            "transfer.chunk: Input should be less than or equal to 1073741824",
        ),
        (
            "[transfer]\nmemory = 8191",
            "transfer.memory: Input should be greater than or equal to 8192",
        ),
        (
            '[transfer]\nmemory = "65GiB"',
            "transfer.memory: Input should be less than or equal to 68719476736",
        ),
        *(
            (
                f"[cache]\n{key} = {value}",
                f"cache.{key}: {NO_AMOUNT}",
            )
            for key, value in (("keep_free", "-1"), ("user_limit", "'100%'"), ("headroom", "'-5%'"))
        ),
    ],
)
def test_a_value_out_of_range_is_refused(path: Path, text: str, fault: str) -> None:
    path.write_text(f"{ROOTS}{text}\n")
    assert refusal(path) == f"{path}: {fault}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('destinations = ["/home"]', "destinations: /home is not beneath one of roots"),
        ('destinations = ["/nvme2"]', "destinations: /nvme2 is not beneath one of roots"),
        (
            '[shared]\nowner = "nobody"\nroots = ["/nvme"]',
            "shared.roots: /nvme is one of roots too; choose another folder",
        ),
    ],
)
def test_folders_that_contradict_each_other_are_refused(path: Path, text: str, fault: str) -> None:
    path.write_text(f"{ROOTS}{text}\n")
    assert refusal(path) == f"{path}: {fault}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            '[shared]\nroots = ["/nvme/all"]',
            "shared: roots needs an owner: the account whose jobs stage there",
        ),
        (
            '[shared]\nowner = "root"',
            "shared.owner: must not be root, which cannot stage; name an unprivileged account",
        ),
        (
            '[shared]\nowner = "x"',
            "shared.owner: this node knows no user 'x'; create the account, or correct the name",
        ),
    ],
    ids=["none", "root", "unknown"],
)
def test_files_for_all_users_belong_to_an_account_that_is_not_root(
    path: Path, text: str, fault: str
) -> None:
    path.write_text(f"{ROOTS}{text}\n")
    assert refusal(path) == f"{path}: {fault}"


def test_the_owner_of_shared_files_is_found_by_name(path: Path) -> None:
    path.write_text(FULL)
    policy = load(path)
    owner = pwd.getpwnam("nobody").pw_uid
    assert (policy.shared_roots, policy.shared_owner) == (("/nvme/all",), owner)
    assert LOCAL.shared_owner == 0


@pytest.mark.parametrize(
    "root", ["", "nvme", "./nvme", "/", "//", "/nvme/", "/a//b", "/a/./b", "/a/.."]
)
def test_a_root_that_is_no_plain_absolute_path_is_refused(path: Path, root: str) -> None:
    path.write_text(f'roots = ["{root}"]\n')
    assert refusal(path) == f"{path}: roots.0: {NOT_PLAIN}"


def test_a_wrong_root_is_named_by_its_place_in_the_list(path: Path) -> None:
    path.write_text('roots = ["/nvme", "scratch", "/ssd", 5]\n')
    assert refusal(path) == (
        f"{path}: roots.1: {NOT_PLAIN}; roots.3: must be a path, or a table with one"
    )


@pytest.mark.parametrize(
    ("entry", "key", "fault"),
    [
        ('"" = "1"', "", NO_NAME),
        ('"A=B" = "1"', "A=B", NO_NAME),
        ('"A\\u0000" = "1"', "A\0", NO_NAME),
        ('A = "\\u0000"', "A", "must not contain a NUL character"),
    ],
)
def test_a_variable_that_no_environment_can_hold_is_refused(
    path: Path, entry: str, key: str, fault: str
) -> None:
    path.write_text(f"{ROOTS}[launch.environment]\n{entry}\n")
    assert refusal(path) == f"{path}: launch.environment.{key}: {fault}"


def test_all_faults_are_told_at_once(path: Path) -> None:
    path.write_text(f"{ROOTS}lock_timeout = 0\n[launch]\nsrun = 5\nnodes = 1\n")
    assert refusal(path) == (
        f"{path}: lock_timeout: Input should be greater than 0; "
        "launch.srun: Input should be a valid string; launch.nodes: unknown key; "
        "stage.toml(5) lists all"
    )


BY_JOB = """
destinations = ["/nvme", "/scratch/%u.%j.%r/in"]
[[roots]]
path = "/nvme"
[[roots]]
path = "/scratch/%u.%j.%r"
hint = "--gres=scratch:GB"
[[roots]]
path = "/tmp"
private = true
[variables]
SLURM_TMPDIR = "/scratch/%u.%j.%r"
"""
IN_JOB = {"u": "alice", "U": "5001", "j": "12", "A": "12", "r": "0"}


def test_in_a_job_what_stands_for_it_is_filled_in(path: Path) -> None:
    path.write_text(BY_JOB)
    rules = load(path).at(IN_JOB)
    own = "/scratch/alice.12.0"
    assert rules.roots == ("/nvme", own, "/tmp")
    assert rules.private_roots == (own, "/tmp")
    assert rules.allowed == ("/nvme", f"{own}/in")
    assert (rules.hints, rules.absent_roots) == ({own: "--gres=scratch:GB"}, ())
    assert rules.variables == {"SLURM_TMPDIR": "/scratch/%u.%j.%r"}


def test_outside_of_a_job_its_folders_are_left_out(path: Path) -> None:
    path.write_text(BY_JOB)
    rules = load(path).at({"u": "alice", "U": "5001"})
    assert (rules.roots, rules.private_roots) == (("/nvme",), ())
    assert rules.absent_roots == ("/scratch/%u.%j.%r", "/tmp")
    # What is not known allows nothing.
    assert rules.allowed == ("/nvme", "/scratch/%u.%j.%r/in")


def test_a_job_cannot_lead_a_root_elsewhere_by_its_name(path: Path) -> None:
    path.write_text('roots = ["/nvme", "/scratch/%x"]\n')
    rules = load(path)
    for name in ("..", ".", "", "../bob", "/etc"):
        assert rules.at({**IN_JOB, "x": name}).roots == ("/nvme",)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('roots = ["/nvme/%z"]', "roots.0: '%z' is not known; known: %u"),
        ('roots = ["/nvme/%"]', "roots.0: '%' is not known; known: %u"),
        ("[[roots]]\nprivate = true", "roots.0.path: is missing"),
        (
            '[[roots]]\npath = "/a"\nprivat = true',
            "roots.0.privat: unknown key; did you mean private?",
        ),
        ('[[roots]]\npath = "a"', "roots.0.path: must be an absolute path"),
        ('[[roots]]\npath = "/a"\nprivate = 1', "roots.0.private: Input should be a valid boolean"),
        (
            'roots = ["/a"]\n[variables]\nX = "/b/%j"',
            "variables.X: /b/%j is not beneath one of roots",
        ),
        ('roots = ["/a"]\n[variables]\n1X = "/a"', "variables.1X: must be letters, digits and _"),
    ],
)
def test_a_root_or_variable_that_cannot_be_is_refused(path: Path, text: str, problem: str) -> None:
    path.write_text(text)
    assert refusal(path).startswith(f"{path}: {problem}")


NO_STORE = (
    """must be "", or an absolute path without '%', '.', '..' or a '/' at its end: """
    "the folder is the same for all jobs and users"
)
WITH_STORE = """
roots = ["/nvme", "/scratch/%u.%j", { path = "/tmp", private = true }]
[cache]
store = "STORE"
[shared]
owner = "nobody"
roots = ["/nvme/all", "/all"]
"""


@pytest.mark.parametrize("store", ["/scratch", "/nvme", "/disk/.slurm-stage/store"])
def test_the_store_holds_copies_but_users_name_none_there(path: Path, store: str) -> None:
    path.write_text(WITH_STORE.replace("STORE", store))
    rules = load(path)
    for policy in (rules, rules.at(IN_JOB)):
        assert policy.store == store
        assert policy.roots.count(store) == 1
        assert store not in {*policy.job_roots, *policy.private_roots}
        assert (store in policy.allowed) == (store == "/nvme")


@pytest.mark.parametrize("store", ["/nvme/store", "/tmp", "/tmp/x", "/nvme/all", "/all", "/all/x"])
def test_the_store_is_not_where_users_stage(path: Path, store: str) -> None:
    path.write_text(WITH_STORE.replace("STORE", store))
    assert refusal(path) == (
        f"{path}: cache.store: {store} is in a folder that users stage to; choose a folder outside "
        "of roots and shared.roots, or one of /nvme"
    )


@pytest.mark.parametrize("store", ["/a/", "/", "a", "/a/../b", "/a//b", "/a/%u"])
def test_the_store_is_one_plain_path(path: Path, store: str) -> None:
    path.write_text(WITH_STORE.replace("STORE", store))
    assert refusal(path) == f"{path}: cache.store: {NO_STORE}"


def test_no_variable_leads_to_the_store(path: Path) -> None:
    path.write_text('roots = ["/nvme"]\n[cache]\nstore = "/disk"\n[variables]\nX = "/disk/x"\n')
    assert refusal(path) == f"{path}: variables.X: /disk/x is not beneath one of roots"
