"""The argument lists and environments that start ranks where Slurm does not."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import LaunchError
from stager.launch import mpiexec, schedulers
from stager.launch.mpi import ABI
from stager.launch.mpiexec import (
    Mpiexec,
    Ranks,
    check_library,
    launch_by_flux,
    launch_by_mpiexec,
    others,
    recognise,
    settle_library,
)
from stager.launch.schedulers import Hosts
from stager.request.items import MAX_REQUEST, StageItem, StageRequest
from stager.request.policy import Launch, Policy

if TYPE_CHECKING:
    from pathlib import Path

HOSTS = ["n1", "n2", "n3"]
NAMES = ["STAGE_REQUEST", "STAGE_PEER_KEY", "OMPI_MCA_btl"]
AGENT = ["/usr/bin/ssh", "-o", "BatchMode=yes"]
LIBRARY = "/opt/slurm-stage/lib/stage_peers.so"
#: What every launcher starts.
RANK = [sys.executable, "-I", "-m", "stager.rank"]


def test_open_mpi_starts_one_rank_on_each_host_and_is_told_names_of_variables() -> None:
    assert mpiexec.openmpi_command("/opt/bin/mpiexec", HOSTS, "/tmp/x/hosts", NAMES, LIBRARY) == [
        "/opt/bin/mpiexec", "-n", "3", "--hostfile", "/tmp/x/hosts", "--map-by", "ppr:1:node",
        "--bind-to", "none", "--wdir", "/", "-x", "STAGE_REQUEST", "-x", "STAGE_PEER_KEY",
        "/usr/bin/env", f"LD_PRELOAD={LIBRARY}", *RANK,
    ]  # fmt: skip
    assert mpiexec.openmpi_command("mpiexec", HOSTS, "h", [])[-len(RANK) - 2 :] == [
        "--wdir",
        "/",
        *RANK,
    ]
    assert mpiexec.openmpi_hostfile(HOSTS) == "n1 slots=1\nn2 slots=1\nn3 slots=1\n"
    ssh = "/usr/bin/ssh -o BatchMode=yes"
    settings = {
        "OMPI_MCA_plm": "rsh", "OMPI_MCA_plm_rsh_agent": ssh, "PRTE_MCA_plm": "ssh",
        "PRTE_MCA_plm_ssh_agent": ssh, "PRTE_MCA_prte_local_tmpdir_base": "/tmp/x",
        "TMPDIR": "/tmp/x",
    }  # fmt: skip
    assert mpiexec.openmpi_variables(["10.0.0.1", "n1"], AGENT, "/tmp/x") == settings
    assert mpiexec.openmpi_variables(["n1.a", "n1.b"], AGENT, "/tmp/x") == {
        **settings, "OMPI_MCA_orte_keep_fqdn_hostnames": "1",
        "PRTE_MCA_prte_keep_fqdn_hostnames": "1",
    }  # fmt: skip


def test_mpiexec_of_open_mpi_has_a_folder_of_its_own_and_the_ranks_the_users(
    tmp_path: Path,
) -> None:
    program = tmp_path / "mpiexec"
    program.write_text("#!/bin/sh\necho 'mpiexec (OpenRTE) 4.1.4'\n")
    program.chmod(0o755)
    launch = Launch(mpiexec=str(program), agent="/bin/true", environment={ABI: "openmpi"})
    request = StageRequest((StageItem("/a", "/nvme/a", "/nvme"),), 1, 1800.0)
    policy = Policy(roots=("/nvme",), launch=launch)
    ranks = Ranks(Hosts(("n1",), "--hosts"), policy, request, {"TMPDIR": "/scratch"}, {}, None)
    with launch_by_mpiexec(ranks) as found:
        assert "TMPDIR=/scratch" in found.argv
        assert "TMPDIR" not in found.argv
        assert (
            found.argv[found.argv.index("--hostfile") + 1] == f"{found.environment['TMPDIR']}/hosts"
        )


def test_hydra_starts_one_rank_on_each_host_and_is_told_names_of_variables() -> None:
    argv = mpiexec.hydra_command("/opt/bin/mpiexec", HOSTS, "/tmp/x/hosts", NAMES, AGENT, LIBRARY)
    assert argv == [
        "/opt/bin/mpiexec", "-n", "3", "-f", "/tmp/x/hosts", "-ppn", "1", "-launcher", "ssh",
        "-launcher-exec", "/usr/bin/ssh", "-bind-to", "none", "-wdir", "/",
        "-genvlist", "STAGE_REQUEST,STAGE_PEER_KEY,OMPI_MCA_btl",
        "/usr/bin/env", f"LD_PRELOAD={LIBRARY}", *RANK,
    ]  # fmt: skip
    assert mpiexec.hydra_hostfile(HOSTS) == "n1:1\nn2:1\nn3:1\n"
    assert mpiexec.hydra_variables(AGENT) == {"HYDRA_LAUNCHER_EXTRA_ARGS": "-o BatchMode=yes"}
    assert mpiexec.hydra_variables(["/etc/mpi/kubexec.sh"]) == {}


def test_flux_starts_one_rank_on_each_node_and_is_told_names_of_variables() -> None:
    hosts = Hosts(("n1", "n2"), "FLUX_JOB_NODELIST")
    assert schedulers.flux_command("/usr/bin/flux", hosts, NAMES, LIBRARY) == [
        "/usr/bin/flux", "run", "--nodes=2", "--ntasks=2", "--job-name=stage", "--cwd=/",
        "--requires=host:n1,n2", "--env=-*", "--env=STAGE_REQUEST", "--env=STAGE_PEER_KEY",
        "--env=OMPI_MCA_btl", "/usr/bin/env", f"LD_PRELOAD={LIBRARY}", *RANK,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("version", "abi", "name"),
    [
        ("mpiexec (OpenRTE) 4.1.4\n\nReport bugs to", "openmpi", "Open MPI 4.1.4"),
        ("mpiexec (Open MPI) 5.0.11\n", "openmpi", "Open MPI 5.0.11"),
        (
            "HYDRA build details:\n    Version:                                 4.0.2\n",
            "mpich", "MPICH 4.0.2",
        ),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240515",
            "mpich", "Intel MPI 2021.13",
        ),
    ],
)  # fmt: skip
def test_an_mpiexec_is_known_by_its_version(version: str, abi: str, name: str) -> None:
    assert recognise("/opt/bin/mpiexec", version) == Mpiexec("/opt/bin/mpiexec", abi, name)


def test_an_mpiexec_that_does_not_fit_is_refused() -> None:
    remedy = "name one in stage.toml (mpiexec in [launch])"
    with pytest.raises(LaunchError) as caught:
        recognise("/bin/mpiexec", "slurm 22.05")
    assert caught.value.message == f"/bin/mpiexec is neither of Open MPI nor of MPICH; {remedy}"
    hydra_mpiexec = Mpiexec("/bin/mpiexec", "mpich", "MPICH 4.0.2")
    check_library(hydra_mpiexec, {"mpich", "openmpi"})
    check_library(hydra_mpiexec, set())
    with pytest.raises(LaunchError) as caught:
        check_library(hydra_mpiexec, {"openmpi"})
    assert caught.value.message == (
        "/bin/mpiexec is of MPICH 4.0.2, but the MPI library of this node is of another kind "
        f"(openmpi); {remedy}"
    )


def test_with_two_libraries_here_the_ranks_load_that_of_mpiexec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libmpi.so.12").touch()
    policy = Policy(roots=("/nvme",))
    mpiexec = Mpiexec("/bin/mpiexec", "mpich", "MPICH 4.0.2")
    assert settle_library(policy, mpiexec).launch.environment == {}
    (tmp_path / "lib/libmpi.so.40").touch()
    assert settle_library(policy, mpiexec).launch.environment == {ABI: "mpich"}


def test_no_secret_and_nothing_of_slurm_is_in_what_mpiexec_is_given(tmp_path: Path) -> None:
    program = tmp_path / "mpiexec"
    program.write_text("#!/bin/sh\necho 'mpiexec (OpenRTE) 4.1.4'\n")
    program.chmod(0o755)
    (tmp_path / "our-ssh").touch(0o755)
    agent = f"{tmp_path}/our-ssh -F 'a b'"
    launch = Launch(mpiexec=str(program), agent=agent, environment={ABI: "openmpi"})
    policy = Policy(roots=("/nvme",), launch=launch)
    request = StageRequest((StageItem("s3://b/k", "/nvme/k", "/nvme"),), 2, 1800.0)
    environment = {
        "AWS_SECRET_ACCESS_KEY": "a0b1c2", "SSH_AUTH_SOCK": "/run/agent", "SLURM_JOB_ID": "17",
        "LD_PRELOAD": "/home/u/evil.so", "LANG": "C.UTF-8",
    }  # fmt: skip
    hosts = Hosts(("n1", "n2"), "PBS_NODEFILE", variables={"PBS_JOBID": "1.s"})
    key = {"STAGE_PEER_KEY": "fedcba"}
    with launch_by_mpiexec(Ranks(hosts, policy, request, environment, key, None)) as found:
        path = found.argv[found.argv.index("--hostfile") + 1]
        with open(path) as file:
            assert file.read() == "n1 slots=1\nn2 slots=1\n"
        given = [word for before, word in pairwise(found.argv) if before == "-x"]
    assert (found.name, found.agent) == (
        "mpiexec of Open MPI 4.1.4", (f"{tmp_path}/our-ssh", "-F", "a b")
    )  # fmt: skip
    assert sorted(given) == [
        "AWS_SECRET_ACCESS_KEY", "HOME", "LANG", "MPI4PY_MPIABI", "STAGE_HELPER", "STAGE_ON_HOSTS",
        "STAGE_PEER_KEY", "STAGE_REQUEST",
    ]  # fmt: skip
    for secret in ("a0b1c2", "fedcba", request.key):
        assert not any(secret in word for word in found.argv)
        assert any(secret in value for value in found.environment.values())
    mine = set(found.environment) - set(given)
    assert mine == {
        "PATH", "SSH_AUTH_SOCK", "PBS_JOBID", "OMPI_MCA_mpi_yield_when_idle", "OMPI_MCA_plm",
        "OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm", "PRTE_MCA_plm_ssh_agent",
        "PRTE_MCA_prte_local_tmpdir_base", "TMPDIR",
    }  # fmt: skip
    assert found.environment["OMPI_MCA_plm_rsh_agent"] == agent
    assert not os.path.exists(path)


def test_this_machine_is_not_reached_by_ssh() -> None:
    assert others(Hosts(("n1", "127.0.0.1", "n2"), "--hosts")) == ["n1", "n2"]
    assert others(Hosts(("localhost", "n1"), "--hosts")) == ["n1"]
    assert others(Hosts((os.uname().nodename, "n1"), "--hosts")) == ["n1"]


@pytest.mark.parametrize("name", ["none-such-mpiexec", "/none/mpiexec"])
def test_without_mpiexec_the_setting_is_named(name: str) -> None:
    policy = Policy(roots=("/nvme",), launch=Launch(mpiexec=name))
    request = StageRequest((), 1, 1800.0)
    with (
        pytest.raises(LaunchError) as caught,
        launch_by_mpiexec(Ranks(Hosts(("n1",), "--hosts"), policy, request, {}, {}, None)),
    ):
        pass
    assert caught.value.message == (
        f"{name}, which starts the ranks where Slurm does not, is not installed here; install Open "
        "MPI or MPICH, or name one in stage.toml (mpiexec in [launch])"
    )


def test_ten_thousand_hosts_fit_into_a_request_and_an_argument_list() -> None:
    hosts = tuple(f"node{number:05}.cluster.site.org" for number in range(10_000))
    request = StageRequest((), len(hosts), 1800.0, hosts=hosts)
    text = request.to_json()
    assert len(text) <= MAX_REQUEST
    assert StageRequest.from_json(text) == request
    argv = mpiexec.openmpi_command("mpiexec", hosts, "/tmp/x/hosts", ["STAGE_REQUEST"], LIBRARY)
    assert sum(map(len, argv)) < 1000
    assert mpiexec.openmpi_hostfile(hosts).count("\n") == len(hosts)


def test_without_flux_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/none")
    hosts = Hosts(("n1",), "FLUX_JOB_NODELIST")
    policy, request = Policy(roots=("/nvme",)), StageRequest((), 1, 1800.0)
    with (
        pytest.raises(LaunchError) as caught,
        launch_by_flux(Ranks(hosts, policy, request, {}, {}, None)),
    ):
        pass
    assert caught.value.message == (
        "flux is in none of the folders of PATH; add its folder, or name the nodes by --hosts"
    )


def test_flux_gets_its_own_variables_and_the_ranks_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flux").touch(0o755)
    monkeypatch.setattr("stager.launch.mpiexec.search_path", lambda _: str(tmp_path))
    hosts = Hosts(("n1", "n2"), "FLUX_JOB_NODELIST", variables={"FLUX_URI": "local:///run/flux"})
    policy, request = Policy(roots=("/nvme",)), StageRequest((), 2, 1800.0)
    key = {"STAGE_PEER_KEY": "fedcba"}
    with launch_by_flux(Ranks(hosts, policy, request, {}, key, None)) as found:
        pass
    assert found.argv[0] == f"{tmp_path}/flux"
    given = {word.removeprefix("--env=") for word in found.argv if word.startswith("--env=")}
    assert {"-*", "STAGE_PEER_KEY", "STAGE_REQUEST"} <= given
    assert "FLUX_URI" not in given
    assert found.environment["FLUX_URI"] == "local:///run/flux"
    assert (found.name, found.agent) == ("flux run", ())
