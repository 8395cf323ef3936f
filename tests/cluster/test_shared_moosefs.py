"""The filesystem of a job's disks with MooseFS, as an administrator sets it up."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.bench.shared_store import make_files
from tests.cluster.servers import Azurite, azurite
from tests.cluster.site import HANGS, POLICY, PREFIX, REPOSITORY, digest, wait_until
from tests.cluster.test_shared_fs import MOUNT, left
from tests.cluster.test_stores import KEY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.site import Site

PROGRAMS = "/opt/moosefs"
#: The driver, and where its programs are: elsewhere a package has them in /usr.
DRIVER = f"""#!/bin/sh
PATH={PROGRAMS}/sbin:{PROGRAMS}/bin:$PATH
exec {PREFIX}/libexec/moosefs "$@"
"""
DATA = "/shared/data:shared:/data,decompress=*.gz"
STAGE = f"--stage={DATA};/shared/wide:shared:/large;:shared:/scratch"
ON_EACH = f"""set -e
[ $STAGE_SHARED = {MOUNT}/$SLURM_JOB_ID ]
diff -r /shared/plain $STAGE_SHARED/data
cmp /shared/wide $STAGE_SHARED/large
hostname > $STAGE_SHARED/scratch/$(hostname)
"""
#: What a job sees there, with the names that its nodes wrote.
SEEN = ".: data large scratch scratch: {}"
#: How many files are checked by their sums, and as many objects.
OBJECTS = 512
CHECK = """set -e
cd $STAGE_SHARED
for folder in objects files; do (cd $folder; sha256sum --quiet -c /shared/sums); done
echo $(hostname) $(find objects files -type f | wc -l) files
"""


@pytest.fixture(scope="module")
def _moosefs(tidied_site: Site) -> None:
    """MooseFS on the site, and some files to stage."""
    site = tidied_site
    shutil.copytree(REPOSITORY / "build/moosefs/usr", site.base / PROGRAMS[1:], symlinks=True)
    driver = site.shared("driver")
    driver.write_text(DRIVER)
    driver.chmod(0o755)
    site.run("chmod 666 /dev/fuse", user="root")  # as the package fuse3 has it
    site.run(
        "mkdir -p /shared/data/in && cd /shared/data && head -c 30M /dev/urandom >large && "
        "for i in $(seq 50); do echo $i >in/$i; done && cp -r . ../plain && gzip -1 large; "
        "yes | head -c 200M >../wide"
    )
    site.shared("each").write_text(ON_EACH)


@pytest.fixture
def shared_site(site: Site, _moosefs: None) -> Iterator[Site]:
    """The site whose jobs get a filesystem of their disks."""
    table = f'[shared_fs]\ndriver = "/shared/driver"\nfolder = "/nvme"\nmount = "{MOUNT}"\n'
    source = f'[source]\nallow = ["az://"]\nendpoints = ["{Azurite.endpoint}"]\n'
    with site.policy(POLICY + table + source):
        yield site


def test_all_nodes_of_a_job_have_its_files(shared_site: Site) -> None:
    script = f"""
    set -e
    [ -z "$(ls $STAGE_SHARED/scratch)" ]
    srun sh /shared/each
    echo $(ls $STAGE_SHARED/scratch)
    stagectl stage {DATA}
    stagectl verify shared:/data
    """
    job = shared_site.sbatch(script, "-N4", STAGE)
    assert (job.wait().exit_code, len(job.output().splitlines())) == ("0:0", 7), job.output()
    of, staged, large, written, of_again, current, verified = job.output().splitlines()
    whose = f"stage: {MOUNT}/{job.id}: filesystem of the disks of 4 nodes, "
    assert of.startswith(whose)
    assert of_again.startswith(whose)
    # All of its servers were known when the stage began.
    assert of_again.split(" of ")[-1] == of.split(" of ")[-1]
    data = f"stage: {MOUNT}/{job.id}/data: "
    assert staged.startswith(
        f"{data}51 files, 30.0 MiB from /shared/data once for n[1-4] (4 nodes) in "
    )
    assert " 200.0 MiB from /shared/wide once for n[1-4] (4 nodes) in " in large
    assert written == "n1 n2 n3 n4"
    assert current.startswith(f"{data}current on n[1-4] (4 nodes), nothing moved (")
    assert verified.removeprefix(f"{data}verified on ") in shared_site.nodes  # one reads it
    wait_until(lambda: left(shared_site) == [], HANGS)


def test_jobs_at_once_on_the_same_nodes_and_on_others_have_files_of_their_own(
    shared_site: Site,
) -> None:
    shared_site.run("rm -f begun go")
    wait = "touch begun; until [ -e go ]; do sleep 0.1; done"
    see = "srun sh /shared/each; cd $STAGE_SHARED; echo $(ls . scratch)"
    first = shared_site.sbatch(f"{wait}; {see}", "-wn1,n2", STAGE)
    home = shared_site.path("login", "/home/alice")
    wait_until((home / "begun").exists, HANGS)
    same = shared_site.sbatch("cd $STAGE_SHARED; rm -r data/in; echo $(ls *)", "-wn1,n2", STAGE)
    others = shared_site.sbatch(see, "-wn3,n4", STAGE)
    for job, last in ((same, "large data: large scratch:"), (others, SEEN.format("n3 n4"))):
        assert (job.wait().exit_code, job.output().splitlines()[3:]) == ("0:0", [last])
    shared_site.await_epilogs()
    assert {line for line in left(shared_site) if not line.startswith(("n1:", "n2:"))} == set()
    assert not [line for line in left(shared_site) if re.search(rf"/{same.id}\b", line)]
    shared_site.run("touch go")
    assert first.wait().exit_code == "0:0", first.output()
    assert first.output().endswith(f"\n{SEEN.format('n1 n2')}\n")
    wait_until(lambda: left(shared_site) == [], HANGS)


@pytest.mark.nightly
def test_many_gzipped_objects_and_files_are_read_once_and_right_on_all_nodes(
    shared_site: Site,
) -> None:
    """512 of each, 2 GB when decompressed, as CosmoFlow's."""
    made = shared_site.shared("set")
    made.mkdir()
    make_files(made, OBJECTS, 4_000_000)
    sums = [f"{digest(one)}  {one.name}\n" for one in (made / "plain").iterdir()]
    shared_site.shared("sums").write_text("".join(sums))
    shutil.rmtree(made / "plain")
    url = f"az://{Azurite.account}/{Azurite.container}/set/"
    sources = {"objects": url, "files": "/shared/set/zipped"}
    wishes = [f"{url}:shared:/{name},decompress=*.gz" for name, url in sources.items()]
    script = f"srun sh /shared/check && stagectl stage {' '.join(wishes)}"
    shared_site.shared("check").write_text(CHECK)
    with azurite(shared_site, KEY) as store:
        store.put_all("/shared/set/zipped", "set/")
        job = shared_site.sbatch(
            script, "-N4", f"--stage={';'.join(wishes)}", env=store.environment
        )
        assert job.wait(600).exit_code == "0:0", job.output()
        asked = store.asked()
    assert (len(asked), {*asked.values()}) == (OBJECTS, {1})
    for name, url in sources.items():
        copy = f"stage: {MOUNT}/{job.id}/{name}: "
        assert (
            f"{copy}512 files, 562.5 MiB from {url} once for n[1-4] (4 nodes) in " in job.output()
        )
        assert f"{copy}current on n[1-4] (4 nodes), nothing moved (" in job.output()
    assert sorted(re.findall("^n. .*", job.output(), re.M)) == [
        f"n{node} {2 * OBJECTS} files" for node in (1, 2, 3, 4)
    ]
    wait_until(lambda: left(shared_site) == [], HANGS)
