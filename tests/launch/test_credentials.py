"""Credentials from the files of the vendors' tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stager.base.errors import UsageError
from stager.launch.credentials import with_credentials
from stager.source.endpoints import URL_SECRETS, Secret, as_text, secrets_of

if TYPE_CHECKING:
    from pathlib import Path

S3, AZ, GS = "s3://bucket/key", "az://account/container/path", "gs://bucket/key"
HUB = "hf://org/model"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        "[default]\naws_access_key_id = A\naws_secret_access_key = S%1\n"
        "[lab]\naws_access_key_id = B\naws_secret_access_key = T\naws_session_token = U\n"
    )
    (tmp_path / ".aws/config").write_text(
        "[default]\nregion = eu-west-1\n"
        "[profile lab]\nregion = us-east-1\nendpoint_url = https://s3.lab:9000\n"
        "[profile sso]\nsso_session = lab\n"
    )
    return tmp_path


def found(environment: dict[str, str], *sources: str) -> dict[str, str]:
    """Return what is added to the environment."""
    result = with_credentials(environment, sources)
    assert all(result[name] == value for name, value in environment.items())
    return {name: value for name, value in result.items() if name not in environment}


def test_a_profile_gives_keys_region_and_endpoint(home: Path) -> None:
    assert found({"HOME": str(home)}, "/a/file", S3) == {
        "AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": "S%1", "AWS_REGION": "eu-west-1",
    }  # fmt: skip
    lab = {
        "AWS_ACCESS_KEY_ID": "B", "AWS_SECRET_ACCESS_KEY": "T", "AWS_SESSION_TOKEN": "U",
        "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": "https://s3.lab:9000",
    }  # fmt: skip
    assert found({"HOME": str(home), "AWS_PROFILE": "lab"}, S3) == lab
    assert found({"HOME": str(home), "AWS_DEFAULT_PROFILE": "lab"}, S3) == lab


def test_the_region_of_the_environment_goes_before_that_of_a_profile(home: Path) -> None:
    given = {"HOME": str(home), "AWS_DEFAULT_REGION": "us-east-2"}
    assert found(given, S3) == {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": "S%1"}


def test_a_home_that_is_not_known_is_no_error() -> None:
    assert found({"HF_TOKEN_PATH": "~nobody-of-that-name/token"}, HUB) == {}


def test_files_elsewhere_are_named_by_variables(home: Path) -> None:
    files = {
        "AWS_SHARED_CREDENTIALS_FILE": str(home / ".aws/credentials"),
        "AWS_CONFIG_FILE": str(home / ".aws/none"),
    }
    assert found(files, S3) == {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": "S%1"}


def test_a_key_in_the_environment_goes_before_that_of_a_profile(home: Path) -> None:
    given = {"HOME": str(home), "AWS_ACCESS_KEY_ID": "X", "AWS_SECRET_ACCESS_KEY": "Y"}
    assert found(given, S3) == {"AWS_REGION": "eu-west-1"}


@pytest.mark.parametrize("sources", [(), ("/a/file",), ("https://host/file",)])
def test_files_are_read_only_for_their_own_stores(home: Path, sources: tuple[str, ...]) -> None:
    assert found({"HOME": str(home), "AWS_PROFILE": "none"}, *sources) == {}


@pytest.mark.parametrize("environment", [{}, {"HOME": ""}, {"HOME": "/nonexistent"}])
def test_without_files_there_is_nothing(environment: dict[str, str]) -> None:
    assert found(environment, S3, AZ, GS, HUB) == {}


def test_a_profile_that_is_missing_is_told(home: Path) -> None:
    with pytest.raises(UsageError) as caught:
        found({"HOME": str(home), "AWS_PROFILE": "other"}, S3)
    assert str(caught.value) == (
        "the profile that AWS_PROFILE names is in no file of profiles; correct one of them\n"
        f"  other is neither in {home}/.aws/credentials nor in {home}/.aws/config"
    )


def test_a_profile_that_only_the_vendors_tool_can_use_is_told(home: Path) -> None:
    with pytest.raises(UsageError) as caught:
        found({"HOME": str(home), "AWS_PROFILE": "sso"}, S3)
    assert str(caught.value) == (
        "your AWS profile takes its key from elsewhere (sso_session); put the key into the "
        'environment before you submit: eval "$(aws configure export-credentials --format env)"\n'
        "  sso"
    )


@pytest.mark.parametrize("text", [b"a secret\n", b"\xff\xfe", b"[x]\nsecret\n"])
def test_a_file_that_is_damaged_is_told_and_nothing_of_it(home: Path, text: bytes) -> None:
    path = home / ".aws/credentials"
    path.write_bytes(text)
    with pytest.raises(UsageError) as caught:
        found({"HOME": str(home)}, S3)
    assert str(caught.value) == (
        f"your file of AWS profiles cannot be read: it is not valid; correct it\n  {path}"
    )


def test_the_application_default_of_google_is_found(home: Path) -> None:
    folder = home / ".config/gcloud"
    folder.mkdir(parents=True)
    path = folder / "application_default_credentials.json"
    path.write_text("{}")
    expected = {"GOOGLE_APPLICATION_CREDENTIALS": str(path)}
    assert found({"HOME": str(home)}, GS) == expected
    assert found({"CLOUDSDK_CONFIG": str(folder)}, GS) == expected
    assert found({"HOME": str(home), "GOOGLE_SERVICE_ACCOUNT": "/x"}, GS) == {}


def test_a_connection_string_of_azure_is_taken_apart() -> None:
    text = (
        "DefaultEndpointsProtocol=https;AccountName=account;AccountKey=aZ+/0==;"
        "BlobEndpoint=https://blob.site:10000/account"
    )
    assert found({"AZURE_STORAGE_CONNECTION_STRING": text}, AZ) == {
        "AZURE_STORAGE_ACCOUNT_KEY": "aZ+/0==",
        "AZURE_STORAGE_ENDPOINT": "https://blob.site:10000/account",
    }
    signed = "BlobEndpoint=https://x;SharedAccessSignature=sv=2024&sig=a%3D"
    assert found({"AZURE_STORAGE_CONNECTION_STRING": signed}, AZ) == {
        "AZURE_STORAGE_SAS_TOKEN": "sv=2024&sig=a%3D", "AZURE_STORAGE_ENDPOINT": "https://x",
    }  # fmt: skip
    assert found({"AZURE_STORAGE_KEY": "key"}, AZ) == {"AZURE_STORAGE_ACCOUNT_KEY": "key"}


def test_the_token_of_a_login_at_the_hub_is_found(home: Path) -> None:
    folder = home / ".cache/huggingface"
    folder.mkdir(parents=True)
    (folder / "token").write_text("hf_secret\n")
    expected = {"HF_TOKEN": "hf_secret"}
    assert found({"HOME": str(home)}, HUB) == expected
    assert found({"HF_HOME": str(folder)}, HUB) == expected
    assert found({"XDG_CACHE_HOME": str(home / ".cache")}, HUB) == expected
    assert found({"HF_TOKEN_PATH": f"{folder}/token"}, HUB) == expected
    assert found({"HOME": str(home), "HF_TOKEN": "other"}, HUB) == {}
    assert found({"HOME": str(home)}, GS) == {}


def test_users_of_hosts_are_found_where_curl_has_them(home: Path) -> None:
    url, other = "https://data.site.org:8443/a", "https://other.org/a"
    file = home / ".netrc"
    file.write_text("machine data.site.org login me password wo:rd\nmachine x login y password z\n")
    file.chmod(0o600)
    job = {"HOME": str(home)}
    assert found(job, url, other) == {URL_SECRETS: as_text({url: Secret("me:wo:rd")})}
    upper = url.replace("data.site", "Data.SITE")
    assert found(job, upper) == {URL_SECRETS: as_text({upper: Secret("me:wo:rd")})}
    file.write_text(file.read_text().replace("data.site", "DATA.Site"))
    assert found(job, url) == {URL_SECRETS: as_text({url: Secret("me:wo:rd")})}
    assert found(job, "http://data.site.org/a", other, S3.replace("s3", "gs")) == {}
    given = {**job, URL_SECRETS: as_text({url: Secret("", "sig=x")})}
    assert secrets_of(with_credentials(given, [url])) == {url: Secret("me:wo:rd", "sig=x")}
    file.chmod(0o640)
    assert found(job, other) == {}
    with pytest.raises(UsageError) as caught:
        found(job, url)
    assert str(caught.value) == (
        f"your ~/.netrc: others may use it; have it your own, by chmod 600\n  {file}"
    )
    file.write_text("not valid")
    assert found(job, url) == {}


def test_the_file_of_credentials_for_registries_is_found_where_tools_keep_it(home: Path) -> None:
    image = "docker://docker.io/image"
    job = {"HOME": str(home), "XDG_RUNTIME_DIR": ""}
    assert found(job, image) == {}
    for place in (".docker/config.json", ".config/containers/auth.json"):
        path = home / place
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        assert found(job, image) == {"REGISTRY_AUTH_FILE": str(path)}
        assert found({**job, "REGISTRY_AUTH_FILE": "/other"}, image) == {}
    assert found(job, GS) == {}
