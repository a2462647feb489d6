"""Pictures: every kind of file becomes what a viewer shows; folders are read by one fixed rule."""

import os
import pickle
import resource
import struct

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from pycls.core.errors import UserError
from pycls.core.transfer import normalized
from pycls.datasets import cifar10, transforms
from pycls.datasets.decode import decode_image
from pycls.datasets.imagefolder import ImageFolder
from pycls.datasets.imagenet import ImageNet


def scene(h=24, w=36):
    """A smooth RGB picture without symmetries."""
    y, x = np.mgrid[0:h, 0:w] / max(h, w)
    return (255 * np.stack([x, y, (x + y) / 3], axis=-1)).astype(np.uint8)


def saved(tmp_path, image, name, **options):
    path = str(tmp_path / name)
    image.save(path, **options)
    return path


def close(a, b, tolerance=6):
    return a.shape == b.shape and np.abs(a.astype(int) - b.astype(int)).max() <= tolerance


BGR = scene()[:, :, ::-1]
FORMATS = {"jpg": {"quality": 98, "subsampling": 0}, "png": {}, "webp": {"lossless": True}, "bmp": {}, "tif": {}}


@pytest.mark.parametrize("decoder", ["opencv", "pillow"])
@pytest.mark.parametrize("ending", FORMATS)
def test_every_format_gives_the_same_picture(tmp_path, ending, decoder):
    path = saved(tmp_path, Image.fromarray(scene()), f"a.{ending}", **FORMATS[ending])
    assert close(decode_image(path, decoder), BGR)
    with open(path, "rb") as f:
        assert np.array_equal(decode_image(f.read(), decoder), decode_image(path, decoder))


@pytest.mark.parametrize("decoder", ["opencv", "pillow"])
def test_modes_become_three_channels_as_a_viewer_shows_them(tmp_path, decoder):
    picture = Image.fromarray(scene())
    grey = np.repeat(np.asarray(picture.convert("L"))[:, :, None], 3, axis=2)
    assert close(decode_image(saved(tmp_path, picture.convert("L"), "grey.png"), decoder), grey)
    assert close(decode_image(saved(tmp_path, picture.convert("L"), "grey.jpg", quality=98), decoder), grey)
    palette = picture.quantize(64)
    shown = np.asarray(palette.convert("RGB"))[:, :, ::-1]
    assert close(decode_image(saved(tmp_path, palette, "palette.png"), decoder), shown, 0)
    cmyk = saved(tmp_path, picture.convert("CMYK"), "cmyk.jpg", quality=98, subsampling=0)
    assert close(decode_image(cmyk, decoder), BGR, 12)


def test_transparency_lies_over_white(tmp_path):
    rgba = np.dstack([scene(), np.full(scene().shape[:2], 255, np.uint8)])
    rgba[:, :10, 3] = 0
    decoded = decode_image(saved(tmp_path, Image.fromarray(rgba), "a.png"))
    assert (decoded[:, :10] == 255).all() and close(decoded[:, 10:], BGR[:, 10:], 0)


@pytest.mark.parametrize("decoder", ["opencv", "pillow"])
@pytest.mark.parametrize("tag", range(1, 9))
def test_rotated_photos_stand_upright(tmp_path, tag, decoder):
    undo = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
            5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
            8: Image.Transpose.ROTATE_270}  # fmt: skip
    stored = Image.fromarray(scene())
    stored = stored.transpose(undo[tag]) if tag in undo else stored
    exif = Image.Exif()
    exif[0x0112] = tag
    path = saved(tmp_path, stored, "photo.jpg", exif=exif, quality=98, subsampling=0)
    assert close(decode_image(path, decoder), BGR, 8)


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_sixteen_bit_ramps_keep_their_levels(tmp_path, ending):
    ramp = np.tile(np.linspace(0, 65535, 512).astype(np.uint16), (8, 1))
    decoded = decode_image(saved(tmp_path, Image.fromarray(ramp), f"ramp.{ending}"))
    assert len(np.unique(decoded)) >= 200
    assert decoded[0, 0, 0] == 0 and decoded[0, -1, 0] == 255 and abs(int(decoded[0, 256, 0]) - 128) <= 1


BAD_FILES = {
    "text": (b"<!DOCTYPE html>", "its content is of no known kind"),
    "empty": (b"", "the file is empty"),
    "cut": (None, "can't be read as a picture"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_unreadable_files_are_named(tmp_path, kind):
    data, message = BAD_FILES[kind]
    if data is None:
        with open(saved(tmp_path, Image.fromarray(scene(400, 400)), "whole.png"), "rb") as f:
            data = f.read()[:600]
    (tmp_path / "bad.png").write_bytes(data)
    with pytest.raises(UserError) as error:
        decode_image(str(tmp_path / "bad.png"))
    assert "bad.png: " in str(error.value) and message in str(error.value) and "<_io" not in str(error.value)


@pytest.mark.parametrize("decoder", ["opencv", "pillow"])
def test_a_cut_off_jpeg_is_refused_whatever_the_decoder(tmp_path, decoder):
    with open(saved(tmp_path, Image.fromarray(scene(120, 160)), "whole.jpg", quality=95), "rb") as f:
        data = f.read()
    (tmp_path / "cut.jpg").write_bytes(data[: len(data) * 3 // 5])
    with pytest.raises(UserError, match="cut.jpg"):
        decode_image(str(tmp_path / "cut.jpg"), decoder)


def test_a_picture_of_absurd_size_is_refused(tmp_path):
    path = saved(tmp_path, Image.new("1", (20000, 20000)), "huge.png")
    with pytest.raises(UserError, match=r"huge\.png.*exceeds limit"):
        decode_image(path)


@pytest.mark.parametrize("top", [1.0, 255.0, 65535.0])
def test_float_ramps_keep_their_levels(tmp_path, top):
    ramp = np.tile(np.linspace(0, top, 512, dtype=np.float32), (8, 1))
    decoded = decode_image(saved(tmp_path, Image.fromarray(ramp), "ramp.tif"))
    assert len(np.unique(decoded)) >= 200 and decoded.max() == 255


@pytest.mark.parametrize("low, high", [(0, 1_000_000), (-500, 500)])
def test_grey_beyond_sixteen_bits_is_refused_rather_than_clipped(tmp_path, low, high):
    ramp = np.tile(np.linspace(low, high, 512).astype(np.int32), (8, 1))
    with pytest.raises(UserError, match=r"deep\.tif.*not those of 16 bits"):
        decode_image(saved(tmp_path, Image.fromarray(ramp), "deep.tif"))


def test_a_red_picture_gives_the_known_tensor_on_every_path(fresh_cfg, tmp_path):
    fresh_cfg.merge_from_list(["TRAIN.IM_SIZE", 32, "TEST.IM_SIZE", 40, "TRAIN.PCA_STD", 0.0])
    for split in ("train", "val"):
        (tmp_path / split / "n01").mkdir(parents=True)
        saved(tmp_path / split / "n01", Image.fromarray(np.tile(np.uint8([255, 0, 0]), (50, 60, 1))), "red.png")
    red = (np.array([1.0, 0.0, 0.0]) - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    for order, expected in (("auto", red[::-1]), ("bgr", red[::-1]), ("rgb", red)):
        fresh_cfg.DATA_LOADER.CHANNEL_ORDER = order
        for split in ("train", "val"):
            image, label = ImageNet(str(tmp_path), split)[0]
            assert image.shape == (3, 32, 32) and image.dtype == np.float32 and label == 0
            assert np.allclose(image, np.reshape(expected, (3, 1, 1)), atol=1e-6)


# ------------------------------------------------------------------------ folders


@pytest.fixture
def tree(fresh_cfg, tmp_path):
    """Makes DATA_DIR/split/class/file pictures from a list of paths; returns tmp_path."""
    fresh_cfg.merge_from_list(["TRAIN.IM_SIZE", 16, "TEST.IM_SIZE", 16])

    def make(*paths):
        for path in paths:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            if path.endswith((".png", ".JPG", ".JPEG")):
                cv2.imwrite(str(tmp_path / path), scene())
            else:
                (tmp_path / path).write_text("x")
        return str(tmp_path)

    return make


def test_classes_are_sorted_as_text_and_strays_are_left_out(tree):
    root = tree("train/10/a.png", "train/2/a.JPG", "train/2/b.JPEG", "train/1/a.png", "train/.thumbs/x.png",
                "train/note.txt",
                "train/1/.DS_Store", "train/1/list.csv", "val/1/a.png")  # fmt: skip
    dataset = ImageFolder(root, "train")
    assert dataset.class_names == ["1", "10", "2"]
    assert [os.path.relpath(dataset.file(i), root) for i in range(len(dataset))] == [
        "train/1/a.png", "train/10/a.png", "train/2/a.JPG", "train/2/b.JPEG"]  # fmt: skip
    assert dataset.labels.tolist() == [0, 1, 2, 2]


def test_a_class_that_testing_lacks_shifts_nobody(tree):
    root = tree("train/a/1.png", "train/b/1.png", "train/c/1.png", "val/c/1.png", "val/b/readme.txt")
    assert ImageFolder(root, "val").labels.tolist() == [2]


def test_a_class_without_pictures_in_a_split_is_named(tree, caplog):
    ImageFolder(tree("train/a/1.png", "train/b/1.png", "train/c/1.png", "val/c/1.png"), "val")
    assert "split 'val': no pictures of 2 of 3 classes: a, b" in caplog.text


def test_files_left_out_because_of_their_ending_are_counted(tree, caplog):
    ImageFolder(tree("train/a/1.png", "train/a/2.gif", "train/b/1.png", "train/b/3.GIF", "train/b/.hidden"), "train")
    assert "2 files left out because of their endings: 2 .gif" in caplog.text


def test_a_class_that_only_testing_has_is_named(tree):
    root = tree("train/a/1.png", "val/a/1.png", "val/zebra/1.png")
    with pytest.raises(UserError, match="zebra"):
        ImageFolder(root, "val")


def test_an_empty_class_or_split_is_named_with_the_endings(tree):
    root = tree("train/a/1.png", "train/empty/readme.txt", "val/a/x.txt")
    with pytest.raises(UserError, match=r"empty: holds no pictures; accepted endings: \.jpg"):
        ImageFolder(root, "train")
    with pytest.raises(UserError, match="val: holds no pictures"):
        ImageFolder(root, "val")
    with pytest.raises(UserError, match="no split folder 'test'"):
        ImageFolder(root, "test")


def test_imagenet_lists_the_folders_that_it_rejects(tree):
    root = tree("train/cats/1.png", "train/dogs/1.png")
    with pytest.raises(UserError, match=r"folders named n########.*cats, dogs"):
        ImageNet(root, "train")


def test_a_split_file_assigns_pictures(tree, fresh_cfg, tmp_path):
    root = tree("a/1.png", "a/2.png", "b/1.png", "b/2.png")
    (tmp_path / "split.txt").write_text("train\ta/1.png\ntrain\tb/1.png\n\nval\tb/2.png\n")
    fresh_cfg.DATA_LOADER.SPLIT_FILE = str(tmp_path / "split.txt")
    assert ImageFolder(root, "train").class_names == ["a", "b"]
    assert ImageFolder(root, "val").labels.tolist() == [1]
    for text, message in (
        ("train a/1.png", "line 1"),
        ("train\ta/9.png", "a/9.png"),
        ("x\ta/1.png", "no split 'train'"),
    ):
        (tmp_path / "split.txt").write_text(text)
        with pytest.raises(UserError, match=message):
            ImageFolder(root, "train")


def test_an_unreadable_picture_stops_or_is_replaced(tree, fresh_cfg, tmp_path):
    root = tree("train/a/1.png", "train/a/2.png")
    (tmp_path / "train" / "a" / "1.png").write_bytes(b"broken")
    with pytest.raises(UserError, match=r"1\.png.*ON_BAD_IMAGE"):
        ImageFolder(root, "train")[(0, (1,))]
    fresh_cfg.DATA_LOADER.ON_BAD_IMAGE = "replace"
    dataset = ImageFolder(root, "train")
    with pytest.warns(UserWarning, match="another picture takes its place"):
        image, _ = dataset[(0, (1,))]
    assert np.array_equal(image, dataset[(0, (1,))][0])


@pytest.fixture
def broken_last(tree, fresh_cfg, tmp_path):
    """A data set of two classes for each split; the last picture of the first class can't be read."""
    fresh_cfg.DATA_LOADER.ON_BAD_IMAGE = "replace"
    root = tree(*(f"{split}/{name}.png" for split in ("train", "val") for name in ("a/1", "a/2", "b/1")))
    for split in ("train", "val"):
        (tmp_path / split / "a" / "2.png").write_bytes(b"broken")
        cv2.imwrite(str(tmp_path / split / "b" / "1.png"), 255 - scene())
    return lambda split: ImageFolder(root, split)


@pytest.mark.filterwarnings("ignore")
def test_a_picture_that_replaces_another_one_brings_its_own_label(broken_last):
    dataset = broken_last("train")
    image, label = dataset[(1, (7,))]
    assert label == 1 and np.array_equal(image, dataset[(2, (7,))][0])


@pytest.mark.filterwarnings("ignore")
def test_a_picture_that_testing_cannot_read_has_the_label_that_nothing_counts(broken_last):
    dataset = broken_last("val")
    assert [dataset[i][1] for i in range(3)] == [0, -1, 1]


def test_data_sets_pickle_and_hold_their_files_in_flat_arrays(tree):
    root = tree(*[f"train/a/{i}.png" for i in range(5)])
    dataset = pickle.loads(pickle.dumps(ImageFolder(root, "train")))
    assert np.array_equal(dataset[(3, (1,))][0], ImageFolder(root, "train")[(3, (1,))][0])
    per_picture = [
        name for name, value in vars(dataset).items() if isinstance(value, (list, dict, tuple)) and len(value) > 1
    ]
    assert per_picture == []


def test_a_test_size_below_the_crop_is_refused(tree, fresh_cfg):
    root = tree("train/a/1.png", "val/a/1.png")
    fresh_cfg.TEST.IM_SIZE = 8
    with pytest.raises(UserError, match="TEST.IM_SIZE: 8 is smaller than"):
        ImageFolder(root, "val")


# --------------------------------------------------------------------- transforms


def test_lighting_moves_along_the_principal_components():
    image = np.zeros((2, 2, 3), dtype=np.float32)
    moved = transforms.lighting(image, 0.1, np.random.default_rng(0))
    assert np.allclose(moved, moved[0, 0]) and moved.any()
    assert transforms.lighting(image, 0.0, np.random.default_rng(0)) is image
    draws = np.array([transforms.lighting(image, 0.1, np.random.default_rng(i))[0, 0] for i in range(4000)])
    vectors = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
    along = draws @ vectors
    assert along.std(axis=0) == pytest.approx(0.1 * np.array([0.2175, 0.0188, 0.0045]), rel=0.1)


@pytest.mark.parametrize("h, w", [(40, 60), (60, 40), (12, 90)])
def test_random_crops_have_the_asked_size_and_repeat_with_their_seed(h, w):
    crops = [
        transforms.random_sized_crop(scene(h, w).astype(np.float32), 20, np.random.default_rng(s)) for s in (1, 1, 2)
    ]
    assert crops[0].shape == (20, 20, 3)
    assert np.array_equal(crops[0], crops[1]) and not np.array_equal(crops[0], crops[2])


def test_a_picture_too_long_for_any_crop_gives_its_scaled_middle():
    image = scene(5, 300).astype(np.float32)
    middle = transforms.center_crop(transforms.scale_shorter_side(image, 20), 20)
    assert np.array_equal(transforms.random_sized_crop(image, 20, np.random.default_rng(0)), middle)


def test_centre_crop_rounds_its_offsets_up():
    image = np.arange(7 * 8).reshape(7, 8)
    assert transforms.center_crop(image, 4)[0, 0] == image[2, 2]


# ------------------------------------------------------------------------ cifar-10


def write_batches(folder, protocol=2):
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        data = {b"data": rng.integers(0, 256, (20, 3072), dtype=np.uint8), b"labels": [i % 10 for i in range(20)]}
        with open(folder / name, "wb") as f:
            pickle.dump(data, f, protocol=protocol)


@pytest.mark.parametrize("protocol", [2, 4])
def test_cifar_batches_are_read_and_normalised(fresh_cfg, tmp_path, protocol):
    fresh_cfg.TRAIN.IM_SIZE = 32
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    write_batches(folder, protocol)
    train, test = cifar10.Cifar10(str(tmp_path), "train"), cifar10.Cifar10(str(folder), "test")
    assert (len(train), len(test)) == (100, 20)
    raw = test.images[3].astype(np.float64)
    means, stds = np.array([125.3, 123.0, 113.9]), np.array([63.0, 62.1, 66.7])
    assert np.allclose(test[3][0], (raw - means[:, None, None]) / stds[:, None, None], atol=1e-5)
    assert train[(0, (5,))][0].shape == (3, 32, 32)


class Attack:
    def __reduce__(self):
        return (os.mkdir, ("attacked",))


def test_damaged_batches_are_named_in_one_line(tmp_path):
    data = {b"data": np.zeros((2, 3072), dtype=np.uint8), b"labels": [1, 2]}
    rng, path = np.random.default_rng(0), tmp_path / "test_batch"
    for protocol in (2, 4):
        whole = pickle.dumps(data, protocol=protocol)
        for _ in range(300):
            damaged = bytearray(whole)
            for at in rng.integers(200, size=3):
                damaged[at] = rng.integers(256)
            path.write_bytes(damaged)
            try:
                cifar10.read_batch(str(path))
            except UserError as error:
                assert "test_batch" in str(error) and "\n" not in str(error)


# Each would take gigabytes, were it believed.
GREEDY = {
    "a number": pickle.EMPTY_DICT + pickle.LONG_BINPUT + struct.pack("<I", 2**31) + pickle.STOP,
    "a number in text": pickle.EMPTY_DICT + pickle.PUT + b"2147483648\n" + pickle.STOP,
    "a length": pickle.BYTEARRAY8 + struct.pack("<Q", 2**36) + b"few" + pickle.STOP,
    "a shape": pickle.dumps({b"data": np.zeros(3, np.uint8)}, 2).replace(b"K\x03\x85", b"J\xff\xff\xff\x7f\x85"),
}


@pytest.mark.parametrize("size", GREEDY)
def test_a_batch_takes_no_more_memory_than_its_file(tmp_path, size):
    (tmp_path / "test_batch").write_bytes(GREEDY[size])
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + 2**30, limit[1]))
    try:
        with pytest.raises(UserError, match="test_batch: is not a CIFAR-10 python batch") as error:
            cifar10.read_batch(str(tmp_path / "test_batch"))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert "MemoryError" not in str(error.value)


def _address_space():
    with open("/proc/self/statm", encoding="utf-8") as f:
        return int(f.read().split()[0]) * resource.getpagesize()


@pytest.mark.parametrize("content", [Attack(), {b"data": Attack()}, torch.zeros(2), [1], {b"data": b"x"}])
def test_crafted_batches_run_no_code(fresh_cfg, tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    fresh_cfg.TRAIN.IM_SIZE = 32
    write_batches(tmp_path)
    with open(tmp_path / "test_batch", "wb") as f:
        pickle.dump(content, f)
    with pytest.raises(UserError, match="test_batch: is not a CIFAR-10 python batch"):
        cifar10.Cifar10(str(tmp_path), "test")
    assert not os.path.exists("attacked")


@pytest.mark.parametrize("order", ["bgr", "rgb"])
@pytest.mark.parametrize("augment", ["", "AutoAugment"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_pictures_that_travel_as_bytes_are_the_same_after_rounding(tree, fresh_cfg, split, augment, order):
    fresh_cfg.TRAIN.IM_SIZE = fresh_cfg.TEST.IM_SIZE = 20
    fresh_cfg.TRAIN.PCA_STD, fresh_cfg.TRAIN.AUGMENT, fresh_cfg.DATA_LOADER.CHANNEL_ORDER = 0.5, augment, order
    root = tree(*(f"{part}/{name}/{i}.png" for part in ("train", "val") for name in "ab" for i in range(3)))
    exact = ImageFolder(root, split)
    fresh_cfg.DATA_LOADER.PIXELS = "uint8"
    in_bytes = ImageFolder(root, split)
    for index in range(len(exact)):
        image, label = exact[index, (1, 2, index)]
        raw, affine, same_label = in_bytes[index, (1, 2, index)]
        assert raw.dtype == np.uint8 and label == same_label
        there = normalized(torch.from_numpy(raw)[None], torch.from_numpy(affine)[None])[0].numpy()
        # In units of the deviation a level is 1 / 255 / 0.22; an augmentation's thresholds blow single pixels up.
        difference = np.abs(there - image)
        assert (difference.mean() if augment else difference.max()) < 1.1 / 255 / 0.22
