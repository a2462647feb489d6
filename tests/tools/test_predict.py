"""Prediction from a checkpoint alone agrees with testing, in every output format."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys

import cv2
import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from pycls.core import builders, config

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint that tells red from green pictures without training, and a folder of such pictures."""
    folder = tmp_path_factory.mktemp("predict")
    config.reset_cfg()
    words = ["MODEL.TYPE", "vit", "MODEL.NUM_CLASSES", 2, "TRAIN.IM_SIZE", 16, "TEST.IM_SIZE", 20, "VIT.PATCH_SIZE", 8,
             "VIT.HIDDEN_DIM", 4, "VIT.MLP_DIM", 4, "VIT.NUM_HEADS", 1, "VIT.NUM_LAYERS", 1, "VIT.CLASSIFIER_TYPE",
             "pooled", "TEST.DATASET", "imagefolder"]  # fmt: skip
    config.cfg.merge_from_list(words)
    model = builders.build_model()
    state = model.state_dict()
    for name, value in state.items():
        value.zero_() if "ln" not in name else None
    # Feature 0 sees red, feature 1 green (input channels are BGR).
    state["stem.patchify.weight"][0, 2] = state["stem.patchify.weight"][1, 1] = 1.0
    state["head.head_fc.weight"][0, 0] = state["head.head_fc.weight"][1, 1] = 2.0
    content = {"model_state": state, "epoch": 0, "test_err": 0.0, "ema_err": 100.0, "cfg": config.cfg.dump()}
    torch.save({**content, "class_names": ["red", "green"]}, folder / "model.pyth")
    torch.save(state, folder / "bare.pyth")
    (folder / "config.yaml").write_text(config.cfg.dump())
    config.reset_cfg()
    (folder / "pictures" / "deep").mkdir(parents=True)
    for name, bgr in (("a_red.png", (0, 0, 255)), ("deep/b_green.JPG", (0, 255, 0)), ("c_red.bmp", (0, 0, 200))):
        cv2.imwrite(str(folder / "pictures" / name), np.full((30, 40, 3), bgr, np.uint8))
    (folder / "pictures" / "notes.txt").write_text("no picture")
    return folder


def test_text_names_the_class_of_each_picture_in_a_folder(run_tool, trained):
    done = run_tool("predict.py", trained / "model.pyth", trained / "pictures")
    assert done.returncode == 0, done.stderr
    best = {line.split("\t")[0].split("/")[-1]: line.split("\t")[1].split()[0] for line in done.stdout.splitlines()}
    assert best == {"a_red.png": "red", "b_green.JPG": "green", "c_red.bmp": "red"}


def test_json_and_csv_say_the_same(run_tool, trained):
    files = [trained / "pictures" / "a_red.png", trained / "pictures" / "deep" / "b_green.JPG"]
    rows = json.loads(run_tool("predict.py", trained / "model.pyth", *files, "--format", "json").stdout)
    table = list(
        csv.DictReader(io.StringIO(run_tool("predict.py", trained / "model.pyth", *files, "--format", "csv").stdout))
    )
    assert [row["classes"][0]["class"] for row in rows] == ["red", "green"]
    assert sum(c["probability"] for c in rows[0]["classes"]) == pytest.approx(1.0)
    flat = [(row["file"], c["class"], c["probability"]) for row in rows for c in row["classes"]]
    assert [(r["file"], r["class"]) for r in table] == [f[:2] for f in flat]
    assert [float(r["probability"]) for r in table] == pytest.approx([f[2] for f in flat], abs=1e-6)


def test_bare_weights_need_a_config(run_tool, trained):
    picture = trained / "pictures" / "a_red.png"
    done = run_tool("predict.py", trained / "bare.pyth", picture)
    assert done.returncode == 2 and "give one with --cfg" in done.stderr and done.stderr.count("\n") == 1
    done = run_tool("predict.py", trained / "bare.pyth", picture, "--cfg", trained / "config.yaml", "--top", 1)
    assert done.returncode == 0 and "\t0 " in done.stdout


def test_classes_without_a_name_go_by_their_number(run_tool, trained):
    content = torch.load(trained / "model.pyth", weights_only=True)
    torch.save({**content, "class_names": ["red"]}, trained / "one_name.pyth")
    done = run_tool("predict.py", trained / "one_name.pyth", trained / "pictures" / "deep" / "b_green.JPG")
    assert done.returncode == 0 and done.stdout.split("\t")[1].startswith("1 ")


def test_class_names_that_are_no_text_read_back_the_same(run_tool, trained):
    content = torch.load(trained / "model.pyth", weights_only=True)
    names = [os.fsdecode(b"c\xff"), "d\u00e9"]
    torch.save({**content, "class_names": names}, trained / "no_text.pyth")
    picture = trained / "pictures" / "a_red.png"
    done = run_tool("predict.py", trained / "no_text.pyth", picture, "--format", "json", PYTHONIOENCODING="utf-8")
    assert done.returncode == 0, done.stderr
    assert [c["class"] for c in json.loads(done.stdout)[0]["classes"]] == names


@pytest.mark.parametrize("form", ["text", "json", "csv"])
def test_a_picture_that_cannot_be_read_is_named_and_the_others_are_predicted(run_tool, trained, tmp_path, form):
    shutil.copytree(trained / "pictures", tmp_path / "some")
    (tmp_path / "some" / "b_broken.png").write_bytes(b"")
    done = run_tool("predict.py", trained / "model.pyth", tmp_path / "some", "--format", form)
    assert done.returncode == 1
    assert [name in done.stdout for name in ("a_red", "b_green", "b_broken", "c_red")] == [True, True, False, True]
    (line,) = done.stderr.splitlines()
    assert "b_broken.png: can't be read as a picture: the file is empty; left out" in line


def test_hidden_folders_are_left_out_as_in_training(run_tool, trained, tmp_path):
    for folder in (".ipynb_checkpoints", "shown"):
        shutil.copytree(trained / "pictures" / "deep", tmp_path / "some" / folder)
    done = run_tool("predict.py", trained / "model.pyth", tmp_path / "some")
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == [str(tmp_path / "some/shown/b_green.JPG")]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_cannot_be_written_is_one_line(trained, unbuffered):
    command = [sys.executable, os.path.join(ROOT, "tools", "predict.py"), trained / "model.pyth", trained / "pictures"]
    variables = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=variables)
    assert done.returncode == 2
    assert done.stderr == "pycls: error: standard output can't be written: No space left on device\n"


MISTAKES = {
    "no picture": (["{d}/model.pyth", "{d}/none.png"], "there is no such file"),
    "empty folder": (["{d}/model.pyth", "{d}/empty"], "holds no pictures"),
    "format": (["{d}/model.pyth", "{d}/pictures", "--format", "xml"], "--format"),
    "top": (["{d}/model.pyth", "{d}/pictures", "--top", "0"], "--top"),
    "no weights": (["{d}/none.pyth", "{d}/pictures"], "no such checkpoint"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(run_tool, trained, name):
    (trained / "empty").mkdir(exist_ok=True)
    words, message = MISTAKES[name]
    done = run_tool("predict.py", *[word.format(d=trained) for word in words])
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_picture_of_a_digit_becomes_its_test_sample(fresh_cfg):
    from pycls.datasets import loader

    fresh_cfg.TRAIN.IM_SIZE = 16
    dataset = loader.construct_dataset("digits", "val", "TEST.DATASET")
    scan = load_digits().images[0]
    picture = np.repeat(
        np.kron(np.rint(scan / 16 * 255).astype(np.uint8), np.ones((5, 5), np.uint8))[:, :, None], 3, axis=2
    )
    assert np.allclose(loader.preparation("digits").prepare(picture), dataset[0][0], atol=0.02)
