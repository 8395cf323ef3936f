"""Objects of S3, of Azure and of Google's store are read once and broadcast, by users' jobs."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from typing import TYPE_CHECKING

from tests.cluster.servers import Azurite, azurite, s3
from tests.cluster.site import POLICY, PYTHON, STAGECTL, digest
from tests.cluster.swift import SECRET, Swift, swift

if TYPE_CHECKING:
    from tests.cluster.site import Site

#: What no record, log, list of processes or description of a job may have in it.
KEY = base64.b64encode(b"the key of an account of Azure, in base64").decode()
SIZE = 20_000_001
BLOB = f"az://{Azurite.account}/{Azurite.container}/folder/object.bin"
COPY = "/nvme/object.bin"
#: An object of S3 and its bytes: 1 GiB, and an odd one, if S3_OBJECT_MIB=1024 is set by hand.
OBJECT = "s3://bucket/folder/object.bin"
OBJECT_SIZE = (int(os.environ.get("S3_OBJECT_MIB", "16")) << 20) + 1


def looked_at(url: str) -> str:
    """Return a script that stages, and prints what others can see of it."""
    return f"""
{STAGECTL} stage --verbose {url}:{COPY} &
while kill -0 $!; do ps -eo args; sleep 0.1; done 2>&-
wait $! || exit
scontrol show job $SLURM_JOB_ID
"""


def assert_copies(site: Site, data: bytes) -> None:
    for node in site.nodes:
        assert site.copy(node, COPY).read_bytes() == data


def assert_nowhere(site: Site, secret: str) -> None:
    records = [record.read_text() for node in site.nodes for record in site.records(node)]
    logs = [log.read_text(errors="replace") for log in (site.base / "log").iterdir()]
    assert not [text for text in records + logs if secret in text]


def s3_policy(readers: int, endpoint: str = Swift.endpoint) -> str:
    return (
        f'{POLICY}[source]\nallow = ["s3://bucket/"]\nendpoints = ["{endpoint}"]\n'
        f"[transfer]\nreaders = {readers}\n"
    )


def assert_refused(site: Site, store: Swift) -> None:
    """Assert what a user is told who has a wrong key, or whose endpoint is not allowed."""
    wrong = {**store.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}
    with site.policy(s3_policy(1)):
        job = site.sbatch("echo it runs", "-N4", f"--stage={OBJECT}:{COPY}", env=wrong)
        assert job.wait().exit_code == "4:0", job.output()
    assert job.output() == (
        f"stage: n1: {OBJECT}: you may not read it (SignatureDoesNotMatch: The request "
        "signature we calculated does not match the signature you provided. Check your key and "
        "signing method.); check that your credentials are in the job's environment, and "
        "permit reading\n"
        "stage: the job's own program was not started (exit code 4)\n"
    )
    with site.policy(s3_policy(1, "https://elsewhere")):
        job = site.sbatch(f"{STAGECTL} stage {OBJECT}:{COPY}", env=store.environment)
        assert job.wait().exit_code == "3:0", job.output()
    assert job.output() == (
        "stage: AWS_ENDPOINT_URL names an endpoint that this site does not allow: it allows "
        "https://elsewhere; ask the administrator (endpoints in [source] of stage.toml)\n"
        f"  {store.endpoint}\n"
    )


def test_each_byte_of_an_object_of_s3_is_served_once_and_its_key_is_nowhere(site: Site) -> None:
    directive = f"--stage={OBJECT}:{COPY}"
    with swift(site) as store:
        for readers in (1, 4):
            data = os.urandom(OBJECT_SIZE)
            store.fill({"folder/object.bin": data})  # the second time, it is replaced
            before = len(store.reads())
            with site.policy(s3_policy(readers)):
                job = site.sbatch("true", "-N4", directive, env=store.environment)
                assert job.wait(timeout=600).exit_code == "0:0", job.output()
                again = site.sbatch(looked_at(OBJECT), "-N4", env=store.environment)
                assert again.wait().exit_code == "0:0", again.output()
            digests = {digest(site.copy(node, COPY)) for node in site.nodes}
            assert digests == {hashlib.sha256(data).hexdigest()}
            assert f"stage: {COPY}: current on n[1-4] (4 nodes), nothing moved" in again.output()
            assert f" from {OBJECT} to n[1-4] (4 nodes) in " in job.output()
            # For both jobs together: what was sent begins where other bytes ended.
            reads = sorted(store.reads()[before:])
            ends = [read.start + read.size for read in reads]
            assert [*(read.start for read in reads), OBJECT_SIZE] == [0, *ends]
            assert "stager.rank" in again.output()
            assert SECRET not in job.output() + again.output()
        assert_refused(site, store)
    assert_nowhere(site, SECRET)


#: Prints a presigned URL of the object.
SIGN = """
from datetime import timedelta
import obstore
store = obstore.store.S3Store("bucket", client_options={"allow_http": True})
print(obstore.sign(store, "GET", "folder/object.bin", timedelta(hours=1)))
"""


def test_a_presigned_url_is_staged_from_a_file_and_its_signature_is_nowhere(site: Site) -> None:
    url = f"{Swift.endpoint}/bucket/folder/object.bin"
    with swift(site) as store:
        data = os.urandom(SIZE)
        store.fill({"folder/object.bin": data})
        signed = site.run([PYTHON, "-c", SIGN], env=store.environment).stdout.strip()
        signature = signed.rpartition("X-Amz-Signature=")[2]
        assert (signed.partition("?")[0], len(signature)) == (url, 64)
        site.run("umask 077; cat >~/url", input=signed)
        with site.policy(f'{POLICY}[source]\nallow = ["{Swift.endpoint}/bucket/"]\n'):
            job = site.sbatch("true", "-N4", f"--stage=@~/url:{COPY}")
            assert job.wait().exit_code == "0:0", job.output()
            again = site.sbatch(looked_at("@~/url"), "-N4")
            assert again.wait().exit_code == "0:0", again.output()
            checked = site.run(f"{STAGECTL} check '{signed}:/nvme/x'", check=False)
            site.run("sed -i s/Signature=./Signature=x/ ~/url")
            refused = site.sbatch("true", "-N1", f"--stage=@~/url:{COPY}")
            assert refused.wait().exit_code == "4:0", refused.output()
    assert_copies(site, data)
    assert f" from {url} to n[1-4] (4 nodes) in " in job.output()
    assert f"stage: {COPY}: current on n[1-4] (4 nodes), nothing moved" in again.output()
    assert "stager.rank" in again.output()
    assert f"{url}: you may not read it (SignatureDoesNotMatch: " in refused.output()
    assert "@/PATH/OF/FILE as source" in checked.stderr
    said = job.output() + again.output() + refused.output() + checked.stdout + checked.stderr
    assert signature[1:] not in said
    assert {json.loads(one.read_text())["source"] for one in site.records("n1")} == {url}
    site.run("rm ~/url")
    search = f"grep -rlsF {signature[1:]} /dev/shm /etc /home /nvme /run /shared /tmp /var; true"
    for node in ("login", *site.nodes):
        assert site.run(search, user="root", on=node).stdout == ""
    assert_nowhere(site, signature[1:])


def azure_policy(readers: int) -> str:
    return (
        f'{POLICY}[source]\nallow = ["az://{Azurite.account}/"]\n'
        f'endpoints = ["{Azurite.endpoint}"]\n[transfer]\nreaders = {readers}\n'
    )


def test_each_byte_of_a_blob_is_served_once_and_its_key_is_nowhere(site: Site) -> None:
    with azurite(site, KEY) as store:
        for readers, asked, served in ((1, 3, SIZE), (4, 3 + 5, 2 * SIZE)):
            data = os.urandom(SIZE)
            store.put("folder/object.bin", data)  # the second time, it is replaced
            with site.policy(azure_policy(readers)):
                job = site.sbatch("true", "-N4", f"--stage={BLOB}:{COPY}", env=store.environment)
                assert job.wait().exit_code == "0:0", job.output()
                assert_copies(site, data)
                assert store.served() == (asked, served)
                again = site.sbatch(looked_at(BLOB), "-N4", env=store.environment)
                assert again.wait().exit_code == "0:0", again.output()
            assert f"stage: {COPY}: current on n[1-4] (4 nodes), nothing moved" in again.output()
            assert store.served() == (asked, served)
            assert "stager.rank" in again.output()
            assert KEY not in job.output() + again.output()
    assert_nowhere(site, KEY)


def test_what_azures_tools_mark_as_a_folder_is_one(site: Site) -> None:
    with azurite(site, KEY) as store, site.policy(azure_policy(1)):
        for path in ("set/full", "set/hollow"):
            store.put(path, b"", hdi_isfolder="true")
        store.put("set/full/file", b"data")
        store.put("set/empty", b"")
        directive = f"--stage=az://{Azurite.account}/{Azurite.container}/set/:/nvme/set"
        job = site.sbatch("cd /nvme/set; find * -printf '%p %y\\n'|sort", directive,
                          env=store.environment)  # fmt: skip
        assert job.wait().exit_code == "0:0", job.output()
        assert job.output().endswith("\nempty f\nfull d\nfull/file f\nhollow d\n")


def test_a_wrong_key_of_azure_is_told_in_the_stores_words(site: Site) -> None:
    with azurite(site, KEY) as store, site.policy(azure_policy(1)):
        wrong = store.environment | {"AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(b"x").decode()}
        job = site.sbatch("echo it runs", "-N4", f"--stage={BLOB}:{COPY}", env=wrong)
        assert job.wait().exit_code == "4:0", job.output()
        assert job.output() == (
            f"stage: n1: {BLOB}: you may not read it (AuthorizationFailure: Server failed to "
            "authenticate the request. Make sure the value of the Authorization header is formed "
            "correctly including the signature.); check that your credentials are in the job's "
            "environment, and permit reading\n"
            "stage: the job's own program was not started (exit code 4)\n"
        )


def test_an_object_of_google_is_read_once(site: Site) -> None:
    # Google's API in XML is that of S3. Only its tokens are its own, and are not tried here.
    data = os.urandom(SIZE)
    site.shared("object.bin").write_bytes(data)
    with s3(site) as endpoint:
        given = {"GOOGLE_BASE_URL": endpoint, "GOOGLE_SKIP_SIGNATURE": "true"}
        source = f'[source]\nallow = ["gs://bucket/"]\nendpoints = ["{endpoint}"]\n'
        place = f"{endpoint}/bucket/folder/object.bin"
        site.run(f"curl -sfX PUT {endpoint}/bucket >/dev/null")
        site.run(f"curl -sfT /shared/object.bin -H 'x-amz-acl: public-read' {place}")
        with site.policy(POLICY + source):
            for outcome in (" MiB from gs://bucket/", "current on n[1-4] (4 nodes), nothing moved"):
                directive = f"--stage=gs://bucket/folder/object.bin:{COPY}"
                job = site.sbatch("true", "-N4", directive, env=given)
                assert job.wait().exit_code == "0:0", job.output()
                assert outcome in job.output()
                assert_copies(site, data)
                log = site.shared("s3.log").read_text()
                assert len(re.findall(r"GET /bucket/folder", log)) == 3


#: Writes an archive, then another object at its key. Prints the version of the archive.
_PUT = """
import io, obstore, tarfile
store = obstore.store.S3Store("bucket", client_options={"allow_http": True})
archive = io.BytesIO()
with tarfile.open(fileobj=archive, mode="w:gz") as tar:
    tar.addfile(tarfile.TarInfo("member"))
print(obstore.put(store, "set.tar.gz", archive.getvalue())["version"])
obstore.put(store, "set.tar.gz", b"no archive")
"""


def test_the_version_of_an_object_that_a_url_names_is_unpacked(site: Site) -> None:
    with s3(site) as endpoint:
        given = {
            "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1",
        }  # fmt: skip
        on = "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
        site.run(f"curl -sfX PUT {endpoint}/bucket >/dev/null")
        site.run(
            f"curl -sfX PUT -H Content-Type:application/xml -d '{on}' {endpoint}/bucket?versioning"
        )
        version = site.run([PYTHON, "-c", _PUT], env=given).stdout.strip()
        url = f"s3://bucket/set.tar.gz?versionId={version}"
        with site.policy(s3_policy(1, endpoint)):
            for outcome in (
                f" from {url} to n[1-2] ",
                "current on n[1-2] (2 nodes), nothing moved",
            ):
                job = site.sbatch("ls /nvme/set", "-N2", f"--stage={url}:/nvme/,extract", env=given)
                assert job.wait().exit_code == "0:0", job.output()
                assert outcome in job.output()
                assert job.output().endswith("\nmember\n")
        assert {json.loads(one.read_text())["source"] for one in site.records("n1")} == {url}
