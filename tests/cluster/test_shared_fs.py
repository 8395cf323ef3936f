"""The filesystem of a job's disks: it is there for jobs that ask, and nothing of it outlives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster.site import HANGS, POLICY, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.site import Site

DRIVER, MOUNT, DATA, NOTES = "/shared/driver", "/run/shared-fs", "/nvme/.slurm-stage-shared", "/run/slurm-stage/shared"
SHARED_FS = f'{POLICY}[shared_fs]\ndriver = "{DRIVER}"\nfolder = "/nvme"\nmount = "{MOUNT}"\n'
#: Two nodes, and a third one of the same partition that has no job.
TWO, WISH = "-wn1,n3", "--stage=:shared:/scratch"
DAEMON = "4242424"
#: Its servers are one with the driver's output and one that is on its own. Its ``stop`` removes
#: nothing, which is the worst that one can do but not end.
SCRIPT = f"""#!/bin/sh
echo "$1 $STAGE_JOB $STAGE_NODES $(id -u)" >> /nvme/calls
[ $1 = start ] || {{ [ ! -e /shared/hangs ] || sleep {DAEMON}; exit 0; }}
setsid sleep {DAEMON} &
setsid sleep {DAEMON} >/dev/null 2>&1 </dev/null &
mkdir -p $STAGE_FOLDER/a/b; touch $STAGE_FOLDER/a/b/c; chmod 0 $STAGE_FOLDER/a/b $STAGE_FOLDER/a
[ $(id -u) != 0 ] || mount -t tmpfs -o uid=$STAGE_UID,mode=0700 job $STAGE_MOUNT
[ ! -e /shared/fails ] || {{ echo begins; echo no disk answers >&2; exit 1; }}
"""


@pytest.fixture(params=["true", "false"])
def shared_site(site: Site, request: pytest.FixtureRequest) -> Iterator[Site]:
    """The site with a driver that runs as the job's user, or as root."""
    driver = site.shared("driver")
    driver.write_text(SCRIPT)
    driver.chmod(0o755)
    with site.policy(f"{SHARED_FS}user = {request.param}\n"):
        yield site
        for name in ("fails", "hangs"):
            site.shared(name).unlink(missing_ok=True)


def left(site: Site) -> list[str]:
    """Return what there is of any job's filesystem on the nodes."""
    look = f"pgrep -fa '[s]leep {DAEMON}'; grep {MOUNT}/ /proc/mounts; ls -d {MOUNT}/* {DATA}/* {NOTES}/*"
    return [
        f"{node}: {line}"
        for node in site.nodes
        for line in site.run(f"{look}; true", user="root", on=node).stdout.splitlines()
    ]


def test_a_job_that_asks(shared_site: Site) -> None:
    site = shared_site
    job = site.sbatch("echo $STAGE_SHARED; ls $STAGE_SHARED; srun pgrep -c -f '[s]leep'", TWO, WISH)
    state = job.wait()
    print(job.output())
    site.await_epilogs()
    print(site.run("cat /nvme/calls", on="n3").stdout, left(site))
    print(site.logs(60))
    assert 0
