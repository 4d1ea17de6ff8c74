"""Published sizes and speeds beside ours: every claim is measured, and drawn."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.published_shapes import Measured
from benchmarks.studies.claims import CLAIMS, Ratios, drawn

SVG = "{http://www.w3.org/2000/svg}"


def test_ratios_are_those_of_the_larger_and_slower_to_this_one():
    large, small = Measured("large", 300, 8e9, 6.0), Measured("small", 100, 4e9, 1.5)
    assert small.beside(large) == Ratios(3.0, 4.0)
    assert large.beside(large) == Ratios(1.0, 1.0)


def test_a_ring_and_a_dot_for_each_claim_lie_where_their_ratio_does():
    """A model measured as published has its dot in the ring."""
    found = {claim.model: claim.published for claim in CLAIMS}
    found["mobilebert"] = Ratios(4.3, 2.6)  # published: 5.5 times faster
    marks = ElementTree.fromstring(drawn(found)).findall(f"{SVG}circle")
    rings = [float(one.get("cx", "nan")) for one in marks if one.get("class") == "mean"]
    dots = [float(one.get("cx", "nan")) for one in marks if one.get("class") == "dot"]
    assert len(rings) == len(dots) == 2 * len(CLAIMS)
    apart = [
        place for place, (one, other) in enumerate(zip(rings, dots, strict=True)) if one != other
    ]
    assert apart == [len(CLAIMS) + [claim.model for claim in CLAIMS].index("mobilebert")]
    assert dots[apart[0]] < rings[apart[0]]


@pytest.mark.parametrize("ratio", [1.0, 25.0])
def test_the_ends_of_the_scale_are_inside_the_picture(ratio):
    tree = ElementTree.fromstring(drawn({claim.model: Ratios(ratio, ratio) for claim in CLAIMS}))
    width = float(tree.get("viewBox", "").split()[2])
    assert all(0 < float(one.get("cx", "nan")) < width for one in tree.iter(f"{SVG}circle"))
