"""The teacher layers that a student's layers learn from."""

import pytest

from trainer.objectives.layers import at_depth, map_layers


@pytest.mark.parametrize(
    ("layers", "student", "teacher", "expected"),
    [
        ("uniform", 4, 12, {1: 3, 2: 6, 3: 9, 4: 12}),
        ("top", 4, 12, {1: 9, 2: 10, 3: 11, 4: 12}),
        ("bottom", 4, 12, {1: 1, 2: 2, 3: 3, 4: 4}),
        ("skip", 6, 12, {1: 2, 2: 4, 3: 6, 4: 8, 5: 10}),
        ("last", 6, 12, {1: 7, 2: 8, 3: 9, 4: 10, 5: 11}),
        ("final", 5, 12, {5: 12}),
        ([1, 1, 7], 3, 12, {1: 1, 2: 1, 3: 7}),
        ({4: 9, 2: 1}, 4, 12, {2: 1, 4: 9}),
    ],
)
def test_layer_maps(layers, student, teacher, expected):
    """The maps of the papers: TinyBERT's 4 of 12, PKD's 6 of 12, MiniLM's last."""
    assert map_layers(layers, student, teacher) == expected


@pytest.mark.parametrize(
    "layers",
    [
        *("uniform", "skip"), [1, 2], [0, 1, 2, 3, 4], [1, 2, 3, 4, 13], {6: 1}, {},
    ],
)  # fmt: skip
def test_maps_that_do_not_exist(layers):
    with pytest.raises(ValueError, match="layers"):
        map_layers(layers, 5, 12)


def test_a_single_layer_has_nothing_left_to_be_patient_with():
    with pytest.raises(ValueError, match="leaves no layer"):
        map_layers("skip", 1, 12)


def test_maps_at_the_same_depth_of_a_teacher_that_has_not_grown():
    mapped = {0: 0, 1: 3, 2: 6, 3: 9, 4: 12}
    assert at_depth(mapped, 12, 12) == mapped
    assert at_depth(mapped, 12, 6) == {0: 0, 1: 2, 2: 3, 3: 5, 4: 6}
    assert at_depth(mapped, 12, 3) == {0: 0, 1: 1, 2: 2, 3: 3, 4: 3}
