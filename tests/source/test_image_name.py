"""The names of container images."""

from __future__ import annotations

import re

import pytest

from stager.source.image_name import ImageName, from_enroot, is_registry
from stager.source.schemes import Scheme

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("url", "image", "reference"),
    [
        ("docker.io/ubuntu", ("docker.io", "ubuntu", "", ""), "docker.io/ubuntu:latest"),
        ("h:5000/a/b-c:v1", ("h:5000", "a/b-c", "v1", ""), "h:5000/a/b-c:v1"),
        (f"localhost/a@{DIGEST}", ("localhost", "a", "", DIGEST), f"localhost/a@{DIGEST}"),
        (f"a.b/c__d:v@{DIGEST}", ("a.b", "c__d", "v", DIGEST), f"a.b/c__d@{DIGEST}"),
    ],
)
def test_an_image_is_asked_for_by_its_digest_or_tag(
    url: str, image: tuple[str, ...], reference: str
) -> None:
    found = ImageName.parse(f"docker://{url}")
    assert (tuple(found), found.reference) == (image, f"docker://{reference}")


BAD_TAG = (
    "has a tag that is not valid: use only 1 to 128 letters, digits, '-', '_' and '.', a letter or "
    "digit first"
)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "is not complete; write docker://REGISTRY/NAME:TAG"),
        ("host:5000/", "is not complete; write docker://REGISTRY/NAME:TAG"),
        ("host:5000/:tag", "is not complete; write docker://REGISTRY/NAME:TAG"),
        *(
            (
                f"{registry}/a",
                (
                    f"has no registry: {registry} is no host with a '.' or a port; write "
                    "docker://REGISTRY/NAME:TAG, for instance with docker.io"
                ),
            )
            for registry in ("library", "-a.b", "a.b:", "a.b:port", "a_b.c", "[::1]:5000")
        ),
        *(
            (
                f"host:5000/{name}",
                (
                    "has a name that is not valid: use only lower-case letters, digits and "
                    "single '.', '_' or '-' between them"
                ),
            )
            for name in ("Image", "a//b", "../a", "a/", "a/..", "a.-b", "a b", "a%2f")
        ),
        ("host:5000/a:", BAD_TAG),
        ("host:5000/a:.v", BAD_TAG),
        ("host:5000/a:" + "v" * 129, BAD_TAG),
        ("host:5000/a@sha256:12", "has a digest that is not sha256: and 64 hexadecimal digits"),
        ("host:5000/a@", "has a digest that is not sha256: and 64 hexadecimal digits"),
    ],
)
def test_what_names_no_image_is_refused(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^(is|has|names) ") as caught:
        ImageName.parse(f"docker://{url}")
    assert str(caught.value) == problem


def test_only_docker_urls_are_images() -> None:
    urls = "docker://h:1/a", "https://h/docker://", "/docker://"
    assert [Scheme.of(url).is_made for url in urls] == [True, False, False]
    assert not is_registry("")


@pytest.mark.parametrize(
    ("uri", "url"),
    [
        ("ubuntu", "docker.io/library/ubuntu"),
        ("ubuntu:24.04", "docker.io/library/ubuntu:24.04"),
        ("team/img:v1", "docker.io/team/img:v1"),
        ("nvcr.io#nvidia/cuda:12.4", "nvcr.io/nvidia/cuda:12.4"),
        ("login:5001#img", "login:5001/img"),
        ("nvcr.io/nvidia/cuda:12.4", "nvcr.io/nvidia/cuda:12.4"),
        (f"login:5001/team/img@{DIGEST}", f"login:5001/team/img@{DIGEST}"),
    ],
)
def test_an_image_has_its_registry_also_in_enroots_form(uri: str, url: str) -> None:
    assert from_enroot(f"docker://{uri}") == f"docker://{url}"


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("", "names no registry; write docker://REGISTRY#NAME:TAG"),
        ("dockerd://ubuntu", "names no registry; write docker://REGISTRY#NAME:TAG"),
        (
            "docker://$oauthtoken@nvcr.io#nvidia/cuda",
            "has a user in it; leave it out and log in (skopeo login, docker login)",
        ),
        (
            "docker://a#b#c",
            (
                "has no registry: a#b is no host with a '.' or a port; write "
                "docker://REGISTRY/NAME:TAG, for instance with docker.io"
            ),
        ),
        ("docker://ubuntu:", BAD_TAG),
    ],
)  # fmt: skip
def test_what_is_no_image_in_a_registry_is_refused(uri: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        from_enroot(uri)
