"""slurm-stage is put into service on a node, replaced while a job runs, and taken out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster.site import PLUGSTACK, PREFIX, SOURCE

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from tests.cluster.site import Site

FOLDER = "/etc/slurm/plugstack.conf.d"
LINE = f"{FOLDER}/00-slurm-stage.conf"
PLUGIN = f"{PREFIX}/lib/spank_stage.so"
WISH = "--stage=/shared/data:/nvme/data"
#: What a node has beneath /usr/local is this machine's own.
ALONE = """\
set -e
mkdir -p /run/local
mount -t tmpfs none /run/local
mkdir /run/local/upper /run/local/work
mount -t overlay none -o lowerdir=/usr/local,upperdir=/run/local/upper,workdir=/run/local/work \\
    /usr/local
"""
#: Nor is what it removes of the disks and of /run the node's.
APART = """\
mount -t tmpfs none /nvme
mount -t tmpfs none /mnt
mkdir /mnt/upper /mnt/work
mount -t overlay none -o lowerdir=/run,upperdir=/mnt/upper,workdir=/mnt/work /run
"""
CANNOT = (
    f"slurm-stage: Slurm cannot load {PLUGIN}, so no line names it; is it built for the Slurm that "
    "is here?\n"
)


@pytest.fixture
def out_of_service(site: Site) -> Iterator[Site]:
    site.write_plugstack("# the site's own\n")
    site.run("head -c 100000 /dev/zero >/shared/data")
    yield site
    site.run(f"rm -rf {FOLDER}; rmdir /run/local 2>/dev/null || true", user="root", on="n1")
    site.write_plugstack(PLUGSTACK)


def serve(site: Site, action: str, before: str = "") -> subprocess.CompletedProcess[str]:
    script = f"{ALONE}{before}\n{PREFIX}/sbin/slurm-stage {action}"
    return site.run(["unshare", "-m", "sh", "-c", script], user="root", on="n1", check=False)


def test_a_line_is_written_if_slurm_can_load_the_plugin_and_else_removed(
    out_of_service: Site,
) -> None:
    site = out_of_service
    done = serve(site, "enable")
    assert done.stdout + done.stderr == (
        f"slurm-stage: {LINE} names {PLUGIN}, which Slurm can load\n"
        f"slurm-stage: /etc/slurm/plugstack.conf includes {FOLDER}\n"
        "slurm-stage: /usr/local has stagectl, slurm-stage, manual pages and completion\n"
    )
    assert site.sbatch("true", "-wn1,n2", WISH).wait().exit_code == "0:0"
    done = serve(site, "enable", f"mount --bind /etc/hosts {PLUGIN}")
    assert done.stderr.endswith(CANNOT)
    assert done.returncode == 1
    assert not site.path("login", LINE).exists()
    assert site.sbatch("true", "-wn1").wait().exit_code == "0:0"
    assert "unrecognized option" in site.run(["srun", WISH, "true"], check=False).stderr


def test_a_line_stays_where_slurm_cannot_be_asked(out_of_service: Site) -> None:
    site = out_of_service
    serve(site, "enable")
    line = site.path("login", LINE).read_text()
    broken = """mount -t tmpfs none /mnt
(echo Nonsense=1; cat /etc/slurm/slurm.conf) >/mnt/slurm.conf
mount --bind /mnt/slurm.conf /etc/slurm/slurm.conf"""
    done = serve(site, "enable", broken)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "srun: fatal: Unable to process configuration file\n"
        "slurm-stage: srun --help fails without the plugin, too; nothing is changed: run this "
        "again when it works\n"
    )
    assert site.path("login", LINE).read_text() == line


def test_whoever_has_no_systemd_is_told_to_start_slurmd(out_of_service: Site) -> None:
    done = serve(out_of_service, "enable", "mount -t tmpfs none /run/slurm-stage")
    assert (done.stdout.splitlines()[-1], done.stderr) == (
        "slurm-stage: start slurmd, or restart it",
        "",
    )


def test_a_mistake_in_stage_toml_is_named_once_and_fails(out_of_service: Site) -> None:
    with out_of_service.policy('roots = ["/nvme"\n'):
        done = serve(out_of_service, "enable")
    message = "/etc/slurm/stage.toml: Unclosed array (at end of document); correct it"
    assert (done.returncode, done.stderr) == (1, f"slurm-stage: {message}\n")


def test_it_is_taken_out_when_the_jobs_that_staged_have_ended(out_of_service: Site) -> None:
    site = out_of_service
    serve(site, "enable")
    site.run("rm -f /shared/go /shared/begun")
    script = "touch /shared/begun; until [ -e /shared/go ]; do sleep 0.1; done"
    job = site.sbatch(script, "-wn1", WISH)
    site.run("until [ -e /shared/begun ]; do sleep 0.1; done")
    disable = [f"{PREFIX}/sbin/slurm-stage", "disable"]
    with site.popen(disable, user="root", on="n1") as process:
        assert process.stdout
        waiting = process.stdout.readline()
        assert waiting == (
            f"slurm-stage: waiting up to 300 s for jobs that have staged here: {job.id}\n"
        )
        assert site.path("login", LINE).exists()
        site.run("touch /shared/go")
        said = process.stdout.read()
    assert said == f"slurm-stage: {LINE} is removed: Slurm loads the plugin no more\n"
    assert job.wait().exit_code == "0:0"
    assert not site.path("login", LINE).exists()
    again = site.run(disable, user="root", on="n1")
    assert again.stdout == f"slurm-stage: {LINE} is not there: Slurm does not load the plugin\n"
    site.run("rm /shared/begun /shared/go")


def test_what_others_need_stays_when_it_is_removed(out_of_service: Site) -> None:
    site = out_of_service
    serve(site, "enable")
    other, plugstack = f"{FOLDER}/50-other.conf", site.path("login", "/etc/slurm/plugstack.conf")
    site.run(f"echo 'optional {PREFIX}/lib/other.so' >{other}", user="root")
    done = serve(site, "remove", APART)
    assert done.stderr == (
        f"slurm-stage: {other} names files of {PREFIX}: remove these lines first\n"
    )
    assert site.path("login", LINE).exists()
    site.run(f"echo '# none' >{other}", user="root")
    assert serve(site, "remove", APART).returncode == 0
    assert not site.path("login", LINE).exists()
    assert f"include {FOLDER}/*.conf\n" in plugstack.read_text()
    site.run(f"rm {other}", user="root")
    assert serve(site, "remove", APART).returncode == 0
    assert plugstack.read_text() == "# the site's own\n"


@pytest.mark.nightly
def test_what_is_installed_is_replaced_in_one_step(site: Site) -> None:
    """It takes a minute, and the network."""
    site.run("head -c 100000 /dev/zero >/shared/data")
    site.run("rm -f /shared/go /shared/begun")
    job = site.sbatch("until [ -e /shared/go ]; do sleep 0.1; done", "-wn1,n2", WISH)
    marker = f"{PREFIX}/lib/python3*/site-packages/stager/base/paths.py"
    site.run(f"echo '# upgraded' >>{SOURCE}/stager/base/paths.py", user="root")
    line = [f"{SOURCE}/packaging/install", "--upgrade", PREFIX]
    environment = {"PYTHON": "/usr/bin/python3"}
    said = site.run(line, user="root", env=environment, host_net=True, timeout=600)
    assert (said.stdout.splitlines()[-1], said.stderr) == (
        f"packaging/install: {PREFIX} is replaced",
        "",
    )
    assert site.run(f"tail -n 1 {marker}").stdout == "# upgraded\n"
    site.run("touch /shared/go")
    assert job.wait().exit_code == "0:0"
    assert site.sbatch("true", "-wn1,n2", WISH).wait().exit_code == "0:0"
    site.run("rm /shared/go")
