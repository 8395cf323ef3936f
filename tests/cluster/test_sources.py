"""Files on the web are read once and broadcast, by ordinary users' jobs."""

from __future__ import annotations

import gzip
import os
from typing import TYPE_CHECKING

import pytest

from stager.base.digest import PIECE
from tests.cluster.cluster import CommandFailed
from tests.cluster.servers import HOST, HTTPS_PORT, nginx, write_object
from tests.cluster.site import POLICY
from tests.support.nightly import repeated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.servers import Nginx
    from tests.cluster.site import Site

SIZE = 40_000_001
URL = f"https://{HOST}:{HTTPS_PORT}/object.bin"
COPY = "/nvme/object.bin"


@pytest.fixture
def web(site: Site) -> Iterator[Nginx]:
    with nginx(site) as server:
        yield server


def policy(web: Nginx, **keys: object) -> str:
    more = "".join(f"{key} = {value}\n" for key, value in keys.items())
    return (
        f'{POLICY}[source]\nallow = ["https://{HOST}:{HTTPS_PORT}/"]\n'
        f'ca_file = "{web.certificate}"\npatience = 2\n{more}'
    )


def assert_copies(site: Site, data: bytes) -> None:
    for node in site.nodes:
        copy = site.copy(node, COPY)
        assert copy.read_bytes() == data
        assert copy.stat().st_mode & 0o777 == 0o600


def test_a_user_and_a_password_are_taken_from_netrc(site: Site, web: Nginx) -> None:
    (web.files / "closed").mkdir()
    data = write_object(web.files / "closed/object.bin", SIZE)
    url = URL.replace("/object", "/closed/object")
    user, password = web.user
    with site.policy(policy(web)):
        unknown = site.sbatch("true", "-N1", f"--stage={url}:{COPY}")
        assert unknown.wait().exit_code == "4:0", unknown.output()
        entry = f"machine {HOST} login {user} password {password}"
        site.run("umask 077; cat >.netrc", input=f"{entry}\n")
        try:
            job = site.sbatch("true", "-N4", f"--stage={url}:{COPY}")
            assert job.wait().exit_code == "0:0", job.output()
        finally:
            site.run("rm .netrc")
    assert_copies(site, data)
    assert unknown.output().splitlines()[0] == (
        f"stage: n1: {url}: the server does not know you; check the URL (in its file, if it has a "
        "secret), and ~/.netrc"
    )
    records = [record.read_text() for node in site.nodes for record in site.records(node)]
    logs = [log.read_text(errors="replace") for log in (site.base / "log").iterdir()]
    assert not [text for text in records + logs if password in text]


@pytest.mark.parametrize("readers", [repeated(1), 4])
def test_each_byte_is_served_once_over_all_nodes(site: Site, web: Nginx, readers: int) -> None:
    data = write_object(web.files / "object.bin", SIZE)
    with site.policy(f"{policy(web)}[transfer]\nreaders = {readers}\n"):
        job = site.sbatch("true", "-N4", f"--stage={URL}:{COPY}")
        assert job.wait().exit_code == "0:0", job.output()
        assert_copies(site, data)
        requests, served = web.served()
        assert served == SIZE
        assert requests == -(-SIZE // (8 << 20 if readers == 1 else 4 << 20))
        again = site.sbatch("true", "-N4", f"--stage={URL}:/nvme/")
        assert again.wait().exit_code == "0:0", again.output()
        assert f"stage: {COPY}: current on n[1-4] (4 nodes), nothing moved" in again.output()
        assert web.served() == (requests, served)


def test_where_all_nodes_see_the_copy_each_asks_for_a_part_of_it(site: Site, web: Nginx) -> None:
    size = 3 * PIECE + 1
    data, root = write_object(web.files / "object.bin", size), "/shared/scratch"
    site.run(f"mkdir -m 1777 {root}", user="root")
    try:
        with site.policy(policy(web).replace(POLICY, f'roots = ["{root}"]\n')):
            job = site.sbatch("true", "-N4", f"--stage={URL}:{root}/object.bin")
            assert job.wait().exit_code == "0:0", job.output()
        assert site.path("login", f"{root}/object.bin").read_bytes() == data
        assert web.served()[1] == size
    finally:
        site.run(f"rm -r {root}", user="root")


def test_a_redirection_to_a_port_that_no_url_names_is_followed(site: Site, web: Nginx) -> None:
    data = write_object(web.files / "object.bin", SIZE)
    url = f"https://{HOST}:{HTTPS_PORT}/moved/object.bin"
    with site.policy(policy(web)):
        job = site.sbatch("true", "-N2", f"--stage={url}:{COPY}")
        assert job.wait().exit_code == "0:0", job.output()
    assert [site.copy(node, COPY).read_bytes() for node in ("n1", "n2")] == [data, data]


def test_a_compressed_object_arrives_decompressed(site: Site, web: Nginx) -> None:
    data = os.urandom(1000) * 20_000
    (web.files / "object.bin.gz").write_bytes(gzip.compress(data))
    with site.policy(policy(web)):
        job = site.sbatch("true", "-N4", f"--stage={URL}.gz:/nvme/,decompress")
        assert job.wait().exit_code == "0:0", job.output()
        assert_copies(site, data)
        assert web.served()[1] == (web.files / "object.bin.gz").stat().st_size


def test_a_replaced_object_moves_again_and_a_node_with_a_copy_sends(site: Site, web: Nginx) -> None:
    write_object(web.files / "object.bin", SIZE)
    with site.policy(policy(web)):
        first = site.sbatch("true", "-N2", f"--stage={URL}:{COPY}")
        assert first.wait().exit_code == "0:0", first.output()
        served = web.served()
        wider = site.sbatch("true", "-N4", f"--stage={URL}:{COPY}")
        assert wider.wait().exit_code == "0:0", wider.output()
        assert "from the copy on n1 to n[3-4]" in wider.output()
        assert web.served() == served
        os.utime(web.files / "object.bin", (1, 1))
        data = write_object(web.files / "object.bin", SIZE + 5)
        last = site.sbatch("true", "-N4", f"--stage={URL}:{COPY}")
        assert last.wait().exit_code == "0:0", last.output()
        assert_copies(site, data)
        assert web.served()[1] == 2 * SIZE + 5


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"https://{HOST}:{HTTPS_PORT}/absent", "no such object; check the URL"),
        (f"https://10.0.0.254:{HTTPS_PORT}/object.bin", "the server's certificate is not valid"),
        (f"https://{HOST}:81/object.bin", "the connection failed, "),
        ("https://nowhere/object.bin", "its host is not known here, "),
    ],
)
def test_what_cannot_be_read_is_told_with_code_4_and_nothing_is_left(
    site: Site, web: Nginx, url: str, message: str
) -> None:
    with site.policy(policy(web).replace(f"https://{HOST}:{HTTPS_PORT}/", "https://")):
        job = site.sbatch("echo it runs", "-wn1,n2", f"--stage={url}:{COPY}")
        assert job.wait().exit_code == "4:0", job.output()
        assert f"stage: n1: {url}: {message}" in job.output()
        assert "it runs" not in job.output()
        assert not any(site.copy(node, COPY).exists() for node in site.nodes)
        write_object(web.files / "object.bin", 1000)
        good = site.sbatch("true", "-wn1,n2", f"--stage={URL}:{COPY}")
        assert good.wait().exit_code == "0:0", good.output()


def test_a_site_that_names_no_urls_refuses_them(site: Site) -> None:
    with pytest.raises(CommandFailed) as caught:
        site.sbatch("true", "-N1", f"--stage={URL}:{COPY}")
    assert (
        f"stage: {URL}: this site stages from no URL; copy it to the shared storage first, or ask "
        "the administrator (allow in [source] of stage.toml)" in str(caught.value)
    )
