"""The environment of the ranks and of other steps."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.base.errors import PolicyRefusal, SourceError
from stager.base.options import Options, Validate
from stager.launch.environment import rank_environment, step_environment
from stager.launch.job import JobContext
from stager.launch.mpiexec import mpiexec_environment
from stager.request.items import StageItem, StageRequest
from stager.request.policy import Launch, Policy, SourceSection
from stager.source.schemes import Scheme

JOB = JobContext(job=17, nodes="n[1-4]", node_count=4)
POLICY = Policy(roots=("/nvme",))
ITEM = StageItem("/shared/img.sqsh", "/nvme/img.sqsh", "/nvme", Options(validate=Validate.STAT))
REQUEST = StageRequest((ITEM,), nodes=4, lock_timeout=1800.0, job=17, key="0f" * 32)
#: REQUEST as the ranks find it.
REQUEST_JSON = REQUEST.to_json()
#: What a rank is always given.
GIVEN = {
    "HOME": "/",
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "SLURM_PMIX_FENCE": "ring",
    "_SLURM_SPANK_OPTION_slurm_stage_stage_helper": "1",
    "STAGE_HELPER": "17",
    "STAGE_REQUEST": REQUEST_JSON,
}
#: All that may pass from a job to the ranks.
ALLOWED = {
    "LANG", "LOGNAME", "TMPDIR", "TZ", "USER", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID",
    "SLURM_CLUSTER_NAME", "SLURM_CONF",
    "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_NODE_ALIASES",
    "SLURM_STEPMGR", "SLURM_WORKING_CLUSTER",
}  # fmt: skip


def test_the_ranks_of_a_job_are_given_what_finds_the_job_and_nothing_that_shapes_the_step() -> None:
    job = {
        "HOME": "/home/u", "USER": "u", "LANG": "C.UTF-8", "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_NUM_NODES": "4", "SLURM_CONF": "/etc/slurm.conf",
        "PATH": "/home/u/bin", "LD_PRELOAD": "/home/u/evil.so", "LD_LIBRARY_PATH": "/home/u/lib",
        "PYTHONPATH": "/home/u/py", "PYTHONSTARTUP": "/home/u/rc", "BASH_ENV": "/home/u/rc",
        "SLURM_NTASKS": "64", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_MPI_TYPE": "none",
        "SLURM_HINT": "nomultithread", "SLURM_DISTRIBUTION": "cyclic", "SLURM_STEP_ID": "0",
        "SLURM_EXPORT_ENV": "NONE", "SRUN_DEBUG": "5", "PMIX_RANK": "0", "PMI_RANK": "0",
        "OMPI_MCA_pml": "ucx", "OMPI_COMM_WORLD_RANK": "0", "MPIR_CVAR_X": "1",
        "STAGE_DIRECTIVES": "/a:/b", "STAGE_REQUEST": "{}",
    }  # fmt: skip
    assert rank_environment(job, POLICY, REQUEST) == {
        **GIVEN, "USER": "u", "LANG": "C.UTF-8", "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_NUM_NODES": "4", "SLURM_CONF": "/etc/slurm.conf",
    }  # fmt: skip


def test_simulated_nodes_may_be_roots_and_share_its_cores() -> None:
    request = StageRequest((ITEM,), 4, 1800.0, local_root="/tmp/nodes")
    found = rank_environment({}, POLICY, request, mpiexec_environment("/tmp/x"))
    assert {name: value for name, value in found.items() if name not in GIVEN} == {
        "OMPI_MCA_btl": "self,sm",
        "OMPI_MCA_btl_sm_backing_directory": "/tmp/x",
        "OMPI_MCA_btl_vader_backing_directory": "/tmp/x",
        "PRTE_MCA_prte_local_tmpdir_base": "/tmp/x",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }


@pytest.mark.parametrize(
    ("interface", "variables"),
    [
        ("auto", {}),
        (
            "hsn0",
            dict.fromkeys(
                ("OMPI_MCA_btl_tcp_if_include", "FI_TCP_IFACE", "FI_SOCKETS_IFACE"), "hsn0"
            ),
        ),
        ("10.1.0.0/16", {"OMPI_MCA_btl_tcp_if_include": "10.1.0.0/16"}),
    ],
)
def test_mpi_over_tcp_uses_the_interface_that_the_site_names(
    interface: str, variables: dict[str, str]
) -> None:
    """On simulated nodes it does not, and what the site sets besides goes before."""
    policy = Policy(roots=("/nvme",), launch=Launch(interface=interface))
    assert rank_environment({}, policy, REQUEST) == {**GIVEN, **variables}
    simulated = StageRequest((ITEM,), 4, 1800.0, job=17, local_root="/tmp/nodes")
    assert not variables.keys() & rank_environment({}, policy, simulated).keys()
    site = {"OMPI_MCA_btl_tcp_if_include": "ib0"}
    policy = Policy(roots=("/nvme",), launch=Launch(interface=interface, environment=site))
    assert rank_environment({}, policy, REQUEST) == {**GIVEN, **variables, **site}


def test_the_sites_environment_goes_before_the_jobs_and_after_the_helpers() -> None:
    site = {"PATH": "/opt/mpi/bin", "HOME": "/none", "UCX_TLS": "rc", "STAGE_REQUEST": "{}"}
    policy = Policy(roots=("/nvme",), launch=Launch(environment=site))
    assert rank_environment({"HOME": "/home/u", "UCX_TLS": "tcp"}, policy, REQUEST) == {
        **GIVEN, "PATH": "/opt/mpi/bin", "HOME": "/none", "UCX_TLS": "rc",
    }  # fmt: skip


@given(
    st.dictionaries(
        st.sampled_from(sorted(ALLOWED | set(GIVEN))) | st.text(min_size=1).map("SLURM_".__add__),
        st.text(),
    )
)
@settings(database=None, max_examples=50)
def test_nothing_passes_to_the_ranks_but_the_allowed(job: dict[str, str]) -> None:
    allowed = {name: value for name, value in job.items() if name in ALLOWED}
    assert rank_environment(job, POLICY, REQUEST) == {**GIVEN, **allowed}


URL = replace(ITEM, source="s3://bucket/key")
#: A URL of each kind that credentials may open.
URLS = (
    "s3://bucket/key", "az://account/container/path", "gs://bucket/key", "hf://org/model",
    "https://host/path", "docker://docker.io/image",
)  # fmt: skip
HUB_URL = "hf://org/model"


def test_credentials_reach_the_ranks_of_a_stage_with_a_url_alone() -> None:
    site = Policy(roots=("/nvme",), source=SourceSection(endpoints=("https://s3.site:9000",)))
    job = {
        "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT_URL": "https://s3.site:9000/",
        "AWS_PROFILE": "me", "OTHER_SECRET": "x",
    }  # fmt: skip
    assert "secret" not in str(rank_environment(job, site, REQUEST))
    found = rank_environment(job, site, replace(REQUEST, items=(ITEM, URL)))
    assert {name: found[name] for name in job if name in found} == {
        "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT_URL": "https://s3.site:9000/",
    }  # fmt: skip


def test_the_file_of_credentials_for_registries_reaches_the_ranks_of_an_image_alone() -> None:
    job = {"REGISTRY_AUTH_FILE": "/home/u/auth.json"}
    request = replace(REQUEST, items=(replace(ITEM, source="docker://docker.io/image"),))
    assert rank_environment(job, POLICY, request)["REGISTRY_AUTH_FILE"] == "/home/u/auth.json"
    request = replace(REQUEST, items=(URL,))
    assert "REGISTRY_AUTH_FILE" not in rank_environment(job, POLICY, request)


def test_an_endpoint_that_the_site_does_not_name_is_refused() -> None:
    request = replace(REQUEST, items=(URL,))
    with pytest.raises(PolicyRefusal) as caught:
        rank_environment({"AWS_ENDPOINT_URL": "https://elsewhere"}, POLICY, request)
    assert str(caught.value) == (
        "AWS_ENDPOINT_URL names an endpoint that this site does not allow: it allows none but the "
        "vendors'; ask the administrator (endpoints in [source] of stage.toml)\n"
        "  https://elsewhere"
    )


@pytest.mark.parametrize("scheme", ["s3://bucket/key", "az://account/c/p", "gs://b/k", HUB_URL])
@pytest.mark.parametrize(
    "endpoint", ["https://me:SECRET@host", "SECRET", "https://host?SECRET", "https://host:SECRET"]
)
def test_no_part_of_what_is_no_endpoint_is_told(scheme: str, endpoint: str) -> None:
    request = replace(REQUEST, items=(replace(URL, source=scheme),))
    for name in Scheme.of(scheme).endpoints:
        with pytest.raises(PolicyRefusal) as caught:
            rank_environment({name: endpoint}, POLICY, request)
        assert str(caught.value) == (
            f"{name} is not the URL of a server; write https://HOST, perhaps with a port and a "
            "path, but without user, password and query"
        )


@pytest.mark.parametrize("character", ["\r", "\n", "\x1b", "\x7f"])
@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("AWS_ACCESS_KEY_ID", URLS[0]), ("AWS_SECRET_ACCESS_KEY", URLS[0]),
        ("AWS_SESSION_TOKEN", URLS[0]), ("AWS_REGION", URLS[0]),
        ("AZURE_STORAGE_TOKEN", URLS[1]), ("AZURE_STORAGE_SAS_TOKEN", URLS[1]),
        ("GOOGLE_APPLICATION_CREDENTIALS", URLS[2]), ("HF_TOKEN", HUB_URL),
        ("HF_ENDPOINT", HUB_URL), ("AWS_ENDPOINT_URL_S3", URLS[0]),
        ("REGISTRY_AUTH_FILE", URLS[5]),
    ],
)  # fmt: skip
def test_a_control_character_in_what_opens_a_store_is_told_but_no_value(
    name: str, url: str, character: str
) -> None:
    request = replace(REQUEST, items=(replace(URL, source=url),))
    with pytest.raises(SourceError) as caught:
        rank_environment({name: f"SECRET{character}"}, POLICY, request)
    assert str(caught.value) == (
        f"{name} has a line end or another control character, which no value of it has; set it to "
        "the value alone, in the job's environment or in your file of credentials"
    )


def test_a_key_of_google_may_have_lines() -> None:
    job = {"GOOGLE_SERVICE_ACCOUNT_KEY": '{\n"private_key": "x"}\n'}
    request = replace(REQUEST, items=(replace(URL, source=URLS[2]),))
    assert rank_environment(job, POLICY, request)["GOOGLE_SERVICE_ACCOUNT_KEY"].endswith("}\n")


@pytest.mark.parametrize(
    ("endpoint", "is_vendors"),
    [
        ("https://s3.eu-west-1.amazonaws.com", True),
        ("https://account.blob.core.windows.net/", True),
        ("http://s3.eu-west-1.amazonaws.com", False),
        ("https://evilamazonaws.com", False),
        ("https://amazonaws.com.evil", False),
        ("https://[x", False),
        ("https://127.0.0.1:9000\\@x.core.windows.net", False),
        ("https://x@s3.amazonaws.com", False),
        ("https://s3.amazonaws.com:abc", False),
        ("https://x y.amazonaws.com", False),
    ],
)
def test_the_vendors_own_endpoints_need_not_be_named(endpoint: str, is_vendors: bool) -> None:
    request = replace(REQUEST, items=(URL,))
    job = {"AWS_ENDPOINT_URL": endpoint}
    if is_vendors:
        assert rank_environment(job, POLICY, request)["AWS_ENDPOINT_URL"] == endpoint
        return
    with pytest.raises(PolicyRefusal):
        rank_environment(job, POLICY, request)


def test_a_stores_credentials_reach_no_stage_of_another_kind_of_store() -> None:
    job = {"AWS_SECRET_ACCESS_KEY": "aws", "AZURE_STORAGE_ACCOUNT_KEY": "azure"}
    request = replace(REQUEST, items=(URL,))
    assert set(rank_environment(job, POLICY, request)) & set(job) == {"AWS_SECRET_ACCESS_KEY"}
    request = replace(REQUEST, items=(replace(ITEM, source="https://host/x"),))
    assert not set(rank_environment(job, POLICY, request)) & set(job)


def test_the_token_of_a_hub_reaches_the_ranks_of_a_stage_from_it_alone() -> None:
    job = {"HF_TOKEN": "hf_secret", "HF_ENDPOINT": "https://huggingface.co/", "HF_HOME": "/home/u"}
    found = rank_environment(job, POLICY, replace(REQUEST, items=(URL,)))
    assert not set(job) & set(found)
    found = rank_environment(job, POLICY, replace(REQUEST, items=(replace(URL, source=HUB_URL),)))
    assert {name: found[name] for name in job if name in found} == {
        "HF_TOKEN": "hf_secret", "HF_ENDPOINT": "https://huggingface.co/",
    }  # fmt: skip


def test_an_endpoint_of_another_scheme_is_of_no_matter() -> None:
    job = {"AWS_ENDPOINT_URL": "https://elsewhere", "HF_ENDPOINT": "https://mirror"}
    request = replace(REQUEST, items=(replace(URL, source="gs://bucket/key"),))
    assert not set(job) & set(rank_environment(job, POLICY, request))
    with pytest.raises(PolicyRefusal) as caught:
        rank_environment(job, POLICY, replace(REQUEST, items=(replace(URL, source=HUB_URL),)))
    assert str(caught.value).startswith("HF_ENDPOINT names an endpoint that this site ")


def test_another_step_has_the_same_environment_without_a_request() -> None:
    job = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "64", "LD_PRELOAD": "/home/u/evil.so"}
    expected = {**GIVEN, "SLURM_JOB_ID": "17"}
    del expected["STAGE_REQUEST"]
    assert step_environment(job, POLICY, 17) == expected


def test_the_reference_lists_all_that_opens_stores() -> None:
    page = Path(__file__).parents[2] / "slurm-config/docs/reference/environment.md"
    table = page.read_text().partition("\n## What opens stores\n")[2].partition("\n## ")[0]
    names = re.compile(r"`([A-Z0-9_]+)`")
    rows = {row.split("`")[1]: row for row in table.splitlines() if row.startswith("| `")}
    job = dict.fromkeys(names.findall(table), "https://huggingface.co")
    assert {*rows} == {f"{url.partition('//')[0]}" for url in URLS}
    for url in URLS:
        passed, _, _ = rows[url.partition("//")[0]].partition("; ")
        request = replace(REQUEST, items=(replace(ITEM, source=url),))
        assert set(rank_environment(job, POLICY, request)) & set(job) == {*names.findall(passed)}
