"""The plot in README: it is drawn from the figures that are kept, all within its frame."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from tests.bench import nodes
from tests.support.session import REPOSITORY

PLOT = REPOSITORY / "slurm-config/docs/nodes.svg"


def test_the_plot_shows_the_figures_that_are_kept() -> None:
    assert PLOT.read_text() == nodes.svg(json.loads(nodes.FIGURES.read_text()))
    assert f"]({PLOT.relative_to(REPOSITORY)})" in (REPOSITORY / "README.md").read_text()


def test_lines_are_higher_for_more_seconds_and_within_the_frame() -> None:
    seconds = {nodes.OURS: [1.0, 1, 1, 2], nodes.SBCAST: [2.0, 2, 3, 5], nodes.EACH: [1.0, 2, 4, 8]}
    plot = ElementTree.fromstring(nodes.svg({"MiB": 1, "rate": 1, "seconds": seconds}))
    lines = [
        line.attrib["points"].split() for line in plot.iter("{http://www.w3.org/2000/svg}polyline")
    ]
    ends = [float(line[-1].split(",")[1]) for line in lines]
    assert nodes.BOTTOM > ends[0] > ends[1] > ends[2] >= nodes.TOP
    assert {line[-1].split(",")[0] for line in lines} == {f"{nodes.RIGHT:.1f}"}
