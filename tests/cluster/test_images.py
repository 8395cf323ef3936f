"""Container images are pulled from a registry by one node, and arrive as files on all."""

from __future__ import annotations

import re
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.cluster.cluster import USERS
from tests.cluster.servers import Registry, registry
from tests.cluster.site import POLICY, PREFIX, STAGECTL, digest
from tests.support.images import BLOBS, NAMES, PASSWORD, encoded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.cluster import Job
    from tests.cluster.site import Site

URL = f"docker://{Registry.name}/team/img:v1"
COPY = "/nvme/team+img+v1.sqsh"
RULES = (
    f'{POLICY}[source]\nallow = ["docker://{Registry.name}/"]\n'
    f'ca_file = "{Registry.certificate}"\npatience = 2\n'
)


@pytest.fixture
def images(site: Site) -> Iterator[Registry]:
    with registry(site) as server, site.policy(RULES):
        yield server


def run(site: Site, script: str = "true", url: str = URL, code: str = "0:0") -> str:
    """Run a job that stages the image to all nodes; return its output."""
    job = site.sbatch(script, "-N4", f"--stage={url}:/nvme/")
    assert job.wait().exit_code == code, job.output()
    return job.output()


def names(site: Site, node: str) -> list[str]:
    """Return the paths in a node's copy."""
    listed = site.run(["unsquashfs", "-lls", COPY], on=node).stdout.splitlines()
    paths = [line.split(" squashfs-root")[1] for line in listed if " squashfs-root" in line]
    return sorted(path.partition(" -> ")[0] for path in paths)


def read(site: Site, node: str, path: str, copy: str = COPY) -> str:
    return site.run(["unsquashfs", "-cat", copy, path], on=node).stdout


def test_an_image_is_pulled_once_for_all_nodes_until_its_tag_moves(
    site: Site, images: Registry
) -> None:
    images.push("team/img:v1", "one")
    assert f"from {URL} to n[1-4] (4 nodes)" in run(site)
    sent = images.sent()
    assert (len(sent), set(sent.values())) == (BLOBS, {1})
    assert len({digest(site.copy(node, COPY)) for node in site.nodes}) == 1
    assert site.copy("n4", COPY).stat().st_mode & 0o777 == 0o600
    assert names(site, "n4") == NAMES
    assert read(site, "n4", "data/kept") == "one\n"
    assert read(site, "n4", "etc/environment").splitlines()[-1] == "GREETING=hello"

    assert f"stage: {COPY}: current on n[1-4] (4 nodes), nothing moved" in run(site)
    site.copy("n1", COPY).unlink()
    assert "from the copy on n2 to n1 in " in run(site)
    assert images.sent() == sent
    assert digest(site.copy("n1", COPY)) == digest(site.copy("n4", COPY))

    images.push("team/img:v1", "two")
    assert f"from {URL} to n[1-4] (4 nodes)" in run(site)
    assert read(site, "n1", "data/kept") == "two\n"


def test_what_cannot_be_pulled_is_told_with_code_4_and_nothing_is_left(
    site: Site, images: Registry
) -> None:
    images.push("team/img:v1", "one")
    wrong = URL.replace(":v1", ":v2")
    output = run(site, "echo it runs", wrong, "4:0")
    assert output == (
        f"stage: n1: {wrong}: no such image (skopeo: reading manifest v2 in {images.name}/team/img:"
        " manifest unknown: manifest unknown); check the URL\n"
        "stage: the job's own program was not started (exit code 4)\n"
    )
    site.run("mv ~/.docker/config.json ~/.docker/elsewhere")
    assert (
        f"stage: n1: {URL}: you may not read it (skopeo: reading manifest v1 in "
        f"{images.name}/team/img: unauthorized: authentication required); log in (skopeo login, "
        "docker login), and submit with the file of credentials where all nodes can read it "
        "(REGISTRY_AUTH_FILE)\n"
    ) in run(site, code="4:0")
    site.write_policy(RULES.replace("ca_file", "# "))
    assert (
        f"stage: n1: {URL}: the registry's certificate is not valid for this name, or not trusted "
        "(skopeo: "
    ) in run(site, code="4:0")
    assert not any(site.copy(node, COPY).exists() for node in site.nodes)
    assert not images.sent()


def begun_pull(site: Site) -> Job:
    """Return a job whose first node is pulling a large image."""
    job = site.sbatch("true", "-N4", f"--stage={URL}:/nvme/")
    deadline = time.monotonic() + 30
    while not list(site.path("n1", "/nvme").glob(".slurm-stage/*/partial/*/image/blobs/*/*")):
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.02)
    return job


def assert_nothing_is_left(site: Site) -> None:
    tools = ["pgrep", "-a", "-x", "skopeo|umoci|mksquashfs"]
    deadline = time.monotonic() + 10
    while site.leftovers() or site.run(tools, on="n1", check=False).stdout:
        assert time.monotonic() < deadline, site.leftovers()
        time.sleep(0.1)


def test_a_pull_that_is_cancelled_or_hangs_leaves_nothing(site: Site, images: Registry) -> None:
    images.push("team/img:v1", "one", 150_000_000)
    job = begun_pull(site)
    job.cancel()
    assert job.wait().state == "CANCELLED"
    assert_nothing_is_left(site)
    site.write_policy(f"{RULES}[transfer]\nstall_timeout = 5\n")
    job = begun_pull(site)
    with images.stopped():
        assert job.wait().exit_code == "8:0", job.output()
    reason = job.output().splitlines()[-2]
    assert reason == (
        f"stage: staging ended early: n1: no progress for 5 s while reading {URL}; submit again; "
        "if it fails again, use other nodes (--exclude) and tell the administrator"
    )
    assert_nothing_is_left(site)


def test_an_image_that_pyxis_asks_for_is_pulled_once_for_all_nodes(
    site: Site, images: Registry
) -> None:
    """pyxis runs the importer on all nodes of a step at once, as the step does here."""
    images.push("team/img:v1", "one")
    images.push("team/img:v2", "two")
    site.run("mkdir /nvme/images-alice /nvme/images", user="bob", on="n2")  # names that he guesses
    importer = f"srun --overlap -N4 {PREFIX}/bin/stage-importer"
    get = f"{importer} get docker://{images.name}#team/img"
    # Two steps want the same image at once; a later one wants another.
    script = f"exec 2>/dev/null; {get}:v1 & {get}:v1 & wait; {get}:v2; {importer} release"
    job = site.sbatch(script, "-N4")
    assert job.wait().exit_code == "0:0", job.output()
    paths = job.output().splitlines()
    first, second = paths[0], paths[-1]
    assert paths == [first] * 8 + [second] * 4
    folder = f"/nvme/.slurm-stage/{USERS['alice']}/images"
    assert re.fullmatch(re.escape(folder) + r"/team\+img\+[0-9a-f]{12}\.sqsh", first)
    assert read(site, "n4", "data/kept", first) == "one\n"
    assert read(site, "n4", "data/kept", second) == "two\n"
    assert images.sent().total() == 2 * BLOBS

    failed = site.run(f"{get}:v3", check=False)
    assert failed.returncode == 128 + signal.SIGTERM  # of the nodes that waited
    assert failed.stdout == ""
    # The second node asks too if the first one needs long.
    told = {line for line in failed.stderr.splitlines() if line.startswith("stage: ")}
    assert {line.partition(" (skopeo")[0] for line in told} == {
        f"stage: docker://{images.name}/team/img:v3: no such image"
    }


def test_the_password_is_nowhere(site: Site, images: Registry) -> None:
    images.push("team/img:v1", "one", 20_000_000)
    script = (
        f"{STAGECTL} stage --verbose {URL}:{COPY} &\n"
        "while kill -0 $!; do ps -eo args; sleep 0.05; done 2>/dev/null\n"
        "wait $! || exit; scontrol show job $SLURM_JOB_ID"
    )
    job = site.sbatch(script, "-N4")
    assert job.wait().exit_code == "0:0", job.output()
    assert "skopeo copy" in job.output()
    records = [record.read_text() for node in site.nodes for record in site.records(node)]
    logs = [log.read_text(errors="replace") for log in (site.base / "log").iterdir()]
    texts = [job.output(), *records, *logs]
    assert not [text for text in texts if PASSWORD in text or encoded() in text]
