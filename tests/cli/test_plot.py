"""The picture that `stagectl bench --plot` draws."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from stager.cli.bench import svg

KIB, MIB = 1 << 10, 1 << 20
SVG = "{http://www.w3.org/2000/svg}"


def drawn(*given: object) -> ElementTree.Element:
    return ElementTree.fromstring(svg(*given))  # type: ignore[arg-type]


def texts(picture: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in picture.iter(f"{SVG}text")]


def points(line: ElementTree.Element) -> list[tuple[float, float]]:
    pairs = (pair.split(",") for pair in line.attrib["points"].split())
    return [(float(x), float(y)) for x, y in pairs]


def test_each_kind_is_a_line_on_axes_with_units() -> None:
    lines = {
        "bcast": [(64 * KIB, 0.5e9), (256 * KIB, 1e9), (4 * MIB, 2e9)],
        "chain": [(64 * KIB, 0.0), (4 * MIB, 1e9)],
    }
    picture = drawn("a < b", "size of the message", lines, {"disk n3": 1.5e9})
    across = ["64 KiB", "256 KiB", "4 MiB"]
    upwards = ["0", "0.5", "1", "1.5", "2"]
    assert texts(picture) == [
        "a < b", *upwards, *across, "size of the message", "rate in GB/s", "bcast", "chain",
        "disk n3",
    ]  # fmt: skip
    bcast, chain = map(points, picture.iter(f"{SVG}polyline"))
    # Logarithmic across: 64 KiB to 256 KiB is a third of the way to 4 MiB. Linear upwards.
    (left, low), (middle, half), (right, high) = bcast
    assert middle - left == pytest.approx((right - left) / 3, abs=0.1)
    assert half - high == pytest.approx(2 * (low - half), abs=0.2)
    assert chain[1] == (right, half)
    colours = {line.attrib["stroke"] for line in picture.iter(f"{SVG}polyline")}
    assert len(colours) == 2
    [limit] = [
        rule for rule in picture.iter(f"{SVG}line")
        if rule.get("stroke-dasharray", "none") != "none"
    ]  # fmt: skip
    assert limit.attrib["y1"] == limit.attrib["y2"] == f"{(half + high) / 2:.1f}"


@pytest.mark.parametrize(
    ("rate", "unit", "highest"),
    [
        (0.0, "rate in B/s", "1"), (3.0, "rate in B/s", "3"), (1500.0, "rate in kB/s", "1.5"),
        (58.6e6, "rate in MB/s", "60"), (1.33e9, "rate in GB/s", "1.5"),
    ],
)  # fmt: skip
def test_rates_have_a_unit_that_fits(rate: float, unit: str, highest: str) -> None:
    found = texts(drawn("", "", {"a": [(KIB, rate)]}, {}))
    assert unit in found
    assert found[found.index("1 KiB") - 1] == highest


def test_everything_is_within_the_picture() -> None:
    lines = {f"kind {number}": [(1 << n, number * 1e9) for n in range(30)] for number in range(30)}
    picture = drawn("x" * 500, "size", lines, {})
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    assert len([text for text in texts(picture) if text.endswith(("iB", " B"))]) == 8
    places = [place for line in picture.iter(f"{SVG}polyline") for place in points(line)]
    places += [
        (float(text.attrib["x"]), float(text.attrib["y"]))
        for text in picture.iter(f"{SVG}text") if "x" in text.attrib
    ]  # fmt: skip
    assert all(0 < x < width and 0 < y < height for x, y in places)
    strokes = [
        (line.attrib["stroke"], line.attrib["stroke-dasharray"])
        for line in picture.iter(f"{SVG}polyline")
    ]
    assert len(set(strokes)) == 18


def test_nothing_measured_is_an_empty_picture() -> None:
    assert texts(drawn("", "size", {}, {})) == ["", "0", "1", "size", "rate in B/s"]
