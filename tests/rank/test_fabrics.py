"""Network fabrics that a node lacks are excluded, and a site's own choice is kept."""

from __future__ import annotations

import pytest

from stager.rank.start import fabrics_to_try

DEBIAN = """\
# Note that this file is only applicable where it is visible.
btl_base_warn_component_unused=0
# mtl = psm2
mtl = ^ofi
btl = ^uct,openib,ofi
pml = ^ucx
"""
#: Settings, devices, and the value of mtl that the rank gets.
FABRICS: dict[str, tuple[str, list[str], str]] = {
    "Debian's settings": (DEBIAN, ["null", "shm"], "^ofi,psm,psm2"),
    "no settings": ("", [], "^psm,psm2"),
    "an empty setting": ("mtl =\n", [], "^psm,psm2"),
    "a node with Omni-Path": (DEBIAN, ["null", "hfi1_0"], "^ofi,psm"),
    "a node with TrueScale": (DEBIAN, ["ipath", "ipath0"], "^ofi,psm2"),
    "a node with both": (DEBIAN, ["hfi1_0", "ipath0"], ""),
    "a site that has left both out": ("mtl = ^psm2,ofi,psm # none here\n", [], ""),
    "a site that names one": ("mtl = psm2\n", [], ""),
    "the last of several lines": ("mtl = psm2\nmtl=^ofi\n", [], "^ofi,psm,psm2"),
}


@pytest.mark.parametrize(("settings", "devices", "value"), FABRICS.values(), ids=FABRICS)
def test_fabrics_that_a_node_lacks_are_left_out_and_the_sites_choice_is_kept(
    settings: str, devices: list[str], value: str
) -> None:
    assert fabrics_to_try(settings, devices) == value
