"""AutoAugment and RandAugment: strings, operations, determinism."""

import numpy as np
import pytest
from PIL import Image

from pycls.core.errors import UserError
from pycls.datasets import augment


def picture():
    y, x = np.mgrid[0:32, 0:40] / 40
    stripes = 0.1 * np.sin(40 * x)
    return np.clip(np.stack([x + stripes, y, (x + y) / 2], axis=-1), 0, 1).astype(np.float32)


GOOD = ["AutoAugment", "RandAugment", "RandAugment_N2_M0.5", "RandAugment_N3_M1_P0.2", "RandAugment_M0"]
BAD = [
    "Autoaugment",
    "RandAugment_",
    "RandAugment_N2_M1.5",
    "RandAugment_N0",
    "RandAugment_M0.5_N2",
    "RandAugment_P2",
    "rand",
]


@pytest.mark.parametrize("text", GOOD)
def test_good_strings_give_pictures_that_repeat_with_their_seed(text):
    apply = augment.make_augment(text)
    for seed in range(20):
        a, b = (apply(picture(), np.random.default_rng(seed)) for _ in range(2))
        assert np.array_equal(a, b) and a.shape == picture().shape and a.dtype == np.float32
        assert a.min() >= 0 and a.max() <= 1


@pytest.mark.parametrize("text", BAD)
def test_bad_strings_are_refused_with_the_valid_forms(text):
    with pytest.raises(UserError, match=r"TRAIN.AUGMENT.*RandAugment_N2_M0.5_P0.5"):
        augment.make_augment(text)


def test_no_string_no_change():
    image = picture()
    assert augment.make_augment("")(image, np.random.default_rng(0)) is image


ALWAYS = {"AutoContrast", "Equalize", "Invert"}


@pytest.mark.parametrize("name", augment._INCREASING)
def test_magnitude_zero_changes_nothing_where_that_is_possible(name):
    image = Image.fromarray((picture() * 255).astype(np.uint8))
    changed = not np.array_equal(
        np.asarray(augment.apply_operation(image, name, 0.0, np.random.default_rng(0))), np.asarray(image)
    )
    assert changed == (name in ALWAYS)


@pytest.mark.parametrize("name", sorted(set(augment._INCREASING) - ALWAYS))
def test_a_larger_magnitude_changes_more(name):
    image = Image.fromarray((picture() * 255).astype(np.uint8))
    base = np.asarray(image).astype(float)
    change = [
        np.abs(np.asarray(augment.apply_operation(image, name, m, np.random.default_rng(4))) - base).mean()
        for m in (0.3, 1.0)
    ]
    assert 0 <= change[0] < change[1]


def test_chance_and_count_are_those_of_the_string():
    image = picture()
    plain = augment._on_array(lambda p, _: p, image, None)
    never = augment.make_augment("RandAugment_N5_M1_P0")
    assert all(np.array_equal(never(image, np.random.default_rng(s)), plain) for s in range(10))
    same = [np.array_equal(augment.make_augment("RandAugment_N1_M1_P0.5")(image, np.random.default_rng(s)), plain)
            for s in range(200)]  # fmt: skip
    assert 70 < sum(same) < 130


def test_all_25_policies_occur():
    assert len(augment._POLICIES) == 25
    assert {name for policy in augment._POLICIES for name, _, _ in policy} <= set(augment._OPERATIONS)
