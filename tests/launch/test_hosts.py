"""Lists of hosts: hostfiles, and where each scheduler names them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import UsageError
from stager.base.interfaces import interfaces, is_address, name_here
from stager.base.paths import LAUNCHERS
from stager.launch import schedulers
from stager.launch.schedulers import MOST_HOSTS, Hosts, choose, parse_hostfile, parse_list

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Files as MPI libraries and schedulers have them.
FILES = {
    "/openmpi": "# the rack\nn1 slots=4 max_slots=4\nn2 slots=2  # spare\n\nn1\n",
    "/mpich": "n1:4\nn2:2 ifname=ib0\n",
    "/folded": "n[1-3] slots=8\nlogin\n",
    "/pbs": "n1.site.org\n" * 4 + "n2.site.org\n" * 4,
    "/lsf": "n1\nn1\nn2\n",
    "/dstack": "10.0.0.1 slots=8\n10.0.0.2 slots=8\n",
    "/operator": "pi-worker-0.pi.default.svc slots=1\npi-worker-1.pi.default.svc slots=1\n",
    "/empty": "# nobody\n",
}
#: An address that no machine has (RFC 5737).
ELSEWHERE = "198.51.100.1"
NAMES = (
    "names have letters, digits, '.', '-' and '_', and do not begin with '-'"
)  # fmt: skip


def read(path: str) -> str:
    """Return a file of FILES."""
    try:
        return FILES[path]
    except KeyError:
        raise FileNotFoundError(2, "No such file or directory", path) from None


def refused(call: object, *arguments: object, **named: object) -> str:
    """Return the message of the UsageError that is raised."""
    assert callable(call)
    with pytest.raises(UsageError) as caught:
        call(*arguments, **named)
    return str(caught.value)


def chosen(environment: Mapping[str, str], **named: str) -> tuple[str, Hosts | None]:
    given = {"hosts": "", "file": "", "launcher": "", **named}
    return choose(environment, read, **given)


@pytest.mark.parametrize(
    ("path", "hosts"),
    [
        ("/openmpi", ("n1", "n2")),
        ("/mpich", ("n1", "n2")),
        ("/folded", ("n1", "n2", "n3", "login")),
        ("/pbs", ("n1.site.org", "n2.site.org")),
        ("/dstack", ("10.0.0.1", "10.0.0.2")),
    ],
)
def test_a_hostfile_names_each_host_once_in_its_order(path: str, hosts: tuple[str, ...]) -> None:
    assert parse_hostfile(read(path), "it") == hosts


@pytest.mark.parametrize(
    "host",
    ["-oProxyCommand=id", "--hostfile", "n1;id", "a\x1b]0;b", "n1$(id)", "é", "u@n1"],
)
def test_what_is_no_host_is_refused_and_shown_in_plain_characters(host: str) -> None:
    shown = host.replace("\x1b", "?")
    for where, message in (
        ("f, line 2", refused(parse_hostfile, f"n1\n{host}\n", "f")),
        ("--hosts", refused(parse_list, host, "--hosts")),
    ):
        assert message == f"{where}: {shown} is not the name of a host; {NAMES}"


def test_a_line_that_is_none_of_a_hostfile_is_named() -> None:
    assert refused(parse_hostfile, "n1\nrank 0=n1 slot=1:0\x07\n", "the hostfile f") == (
        "the hostfile f, line 2: rank 0=n1 slot=1:0? is not a host with its slots; write one host "
        "on each line, such as n1 or n1 slots=2"
    )


def test_ten_thousand_hosts_are_read_and_too_many_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(parse_hostfile("n[1-10000] slots=2\n", "f")) == 10_000
    text = "".join(f"n{number}\n" for number in range(MOST_HOSTS))
    assert len(parse_hostfile(text, "f")) == MOST_HOSTS
    many = f"f names more than {MOST_HOSTS} hosts; name fewer"
    assert refused(parse_hostfile, f"{text}more\n", "f") == many
    for huge in ("n[1-999999999]", "a[1-1000]b[1-1000]", "n[0-99999999999999999]"):
        assert refused(parse_list, huge, "f") == many
    again = f"f, line 2 names more than {MOST_HOSTS} hosts; name fewer"
    monkeypatch.setattr("stager.launch.job.unfold", lambda _: ["n1"] * 60_000)  # the first alone
    assert refused(parse_hostfile, "n[1-60000]\n" * 200, "f") == again
    name = "x" * 253
    assert parse_list(name, "f") == (name,)
    assert refused(parse_list, f"{name}x", "f") == f"f: {name} is not the name of a host; {NAMES}"


def test_files_that_name_nobody_are_told() -> None:
    assert refused(chosen, {}, file="/none") == (
        "the hostfile /none cannot be read: No such file or directory; check the path"
    )
    assert refused(chosen, {"PBS_NODEFILE": "/none"}) == (
        "/none (PBS_NODEFILE) cannot be read: No such file or directory; check the path"
    )
    assert refused(chosen, {"LSB_DJOB_HOSTFILE": "/empty"}) == (
        "/empty (LSB_DJOB_HOSTFILE) names no host; write one host on each line"
    )


def test_what_the_user_names_comes_first_then_slurm_then_the_others_in_their_order() -> None:
    every = {
        "HYDRA_HOST_FILE": "/mpich", "DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2",
        "LSB_DJOB_HOSTFILE": "/lsf", "PBS_NODEFILE": "/pbs", "FLUX_JOB_ID": "f1",
        "FLUX_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "17",
    }  # fmt: skip
    assert chosen(every, hosts="n[7-8]") == ("hosts", Hosts(("n7", "n8"), "--hosts"))
    assert chosen(every, file="/openmpi") == ("hosts", Hosts(("n1", "n2"), "--hostfile"))
    for launcher in LAUNCHERS:
        assert chosen(every, launcher=launcher)[0] == launcher
    found = []
    while every:
        found.append(chosen(every)[0])
        every.popitem()
        every.pop("FLUX_JOB_ID", "") if "FLUX_JOB_NODELIST" not in every else None
    assert found == list(LAUNCHERS)
    assert chosen({}) == ("slurm", None)


def test_a_launcher_outside_of_its_jobs_is_refused() -> None:
    assert refused(chosen, {"SLURM_JOB_ID": "17"}, launcher="pbs") == (
        "not inside a job of pbs: PBS_NODEFILE is not set; name the nodes by --hostfile"
    )
    only = "use only one of --hosts, --hostfile and --launcher"
    assert refused(chosen, {}, hosts="n1", file="/pbs") == only
    assert refused(chosen, {}, hosts="n1", launcher="pbs") == only


def test_pbs_and_lsf_keep_what_their_own_agents_need() -> None:
    variables = {"PBS_NODEFILE": "/pbs", "PBS_JOBID": "123.server"}
    found = schedulers.find_pbs({**variables, "PATH": "/bin"}, read)
    assert found == Hosts(("n1.site.org", "n2.site.org"), "PBS_NODEFILE", variables=variables)
    variables = {"LSB_DJOB_HOSTFILE": "/lsf", "LSB_JOBID": "9", "LSF_ENVDIR": "/etc", "LS_X": "1"}
    found = schedulers.find_lsf({**variables, "PATH": "/bin"}, read)
    assert found == Hosts(("n1", "n2"), "LSB_DJOB_HOSTFILE", variables=variables)


def test_the_nodes_of_a_dstack_task_are_found_on_each() -> None:
    addresses = {"DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2", "DSTACK_NODE_RANK": "1"}
    hosts = ("10.0.0.1", "10.0.0.2")
    assert chosen(addresses) == ("dstack", Hosts(hosts, "DSTACK_NODES_IPS"))
    both = {**addresses, "DSTACK_MPI_HOSTFILE": "/dstack"}
    assert chosen(both) == ("dstack", Hosts(hosts, "DSTACK_MPI_HOSTFILE"))


def test_an_mpijob_has_the_agent_of_its_operator() -> None:
    variables = {
        "OMPI_MCA_orte_default_hostfile": "/operator",
        "OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh",
    }
    workers = ("pi-worker-0.pi.default.svc", "pi-worker-1.pi.default.svc")
    origin = "OMPI_MCA_orte_default_hostfile"
    assert schedulers.find_kubernetes(variables, read) == Hosts(
        workers, origin, ("/etc/mpi/kubexec.sh",)
    )
    del variables["OMPI_MCA_plm_rsh_agent"]
    variables["OMPI_MCA_plm_rsh_args"] = "-o ConnectionAttempts=10"
    agent = ("ssh", "-o", "ConnectionAttempts=10")
    assert schedulers.find_kubernetes(variables, read) == Hosts(workers, origin, agent)
    variables["OMPI_MCA_plm_rsh_args"] = "'"
    assert refused(schedulers.find_kubernetes, variables, read) == (
        "OMPI_MCA_plm_rsh_agent or OMPI_MCA_plm_rsh_args cannot be read: No closing quotation"
    )


def test_flux_names_the_nodes_and_how_it_is_reached() -> None:
    variables = {"FLUX_URI": "local:///run/flux/local", "FLUX_EXEC_PATH": "/usr/libexec/flux/cmd"}
    job = {**variables, "FLUX_JOB_ID": "f2", "FLUX_JOB_NODELIST": "n[1-2]", "PATH": "/bin"}
    assert schedulers.find_flux(job, read) == Hosts(
        ("n1", "n2"), "FLUX_JOB_NODELIST", variables=variables
    )


@pytest.mark.parametrize(
    ("own", "hosts", "found"),
    [
        ("n2.site.org", ["n1", "n2.site.org", "n2"], "n2.site.org"),
        ("n2.site.org", ["n1", "n2", "n20"], "n2"),
        ("n2.site.org", ["n1", "n2.site"], "n2.site"),
        ("n2.site.org", ["n1", "n2.a"], ""),
        ("n2", ["n1", "n2.a"], "n2.a"),
        ("n2", ["n1", "n2.a", "n2.b"], ""),
        ("n2", ["n1", "n2-alias"], ""),
        ("n2", ["localhost"], "localhost"),
        ("n2", ["127.0.0.1"], "127.0.0.1"),
        # Each machine would take these for itself.
        ("n2", ["localhost", "n1"], ""),
        ("n2", [ELSEWHERE, "127.0.0.1"], ""),
    ],
)
def test_this_machine_is_found_among_hosts(
    monkeypatch: pytest.MonkeyPatch, own: str, hosts: list[str], found: str
) -> None:
    facts = list(os.uname())
    monkeypatch.setattr(os, "uname", lambda: os.uname_result([facts[0], own, *facts[2:]]))
    assert name_here(hosts) == found


def test_this_machine_is_found_by_its_addresses() -> None:
    own = [one.partition("/")[0] for link in interfaces() for one in link.addresses]
    own = [address for address in own if is_address(address)]
    assert [name_here([ELSEWHERE, address]) for address in own] == own
    assert name_here([ELSEWHERE]) == ""
