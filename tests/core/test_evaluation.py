"""Intervals, logits in order for any number of processes, errors by class."""

import csv
import os

import numpy as np
import pytest
import torch
from PIL import Image

from pycls.core import builders, config, evaluation


@pytest.mark.parametrize(
    "error, samples, low, high", [(50.0, 100, 40.38, 59.62), (0.0, 20, 0.0, 16.11), (100.0, 20, 83.89, 100)]
)
def test_interval_is_wilsons(error, samples, low, high):
    assert evaluation.error_interval(error, samples) == pytest.approx((low, high), abs=0.01)


def test_report_names_the_worst_class_and_what_it_is_taken_for(tmp_path):
    labels = np.array([0, 0, 1, 1, 1, 2])
    logits = np.eye(3)[[0, 2, 1, 1, 1, 2]]
    table, picture = evaluation.write_report(logits, labels, ["ant", "bee", "cat"], str(tmp_path))
    with open(table) as f:
        rows = list(csv.DictReader(f))
    assert rows[0] == {"class": "ant", "samples": "2", "top1_err": "50.00", "most_often_taken_for": "cat"}
    assert evaluation.confusion_matrix(logits, labels).tolist() == [[1, 0, 1], [0, 3, 0], [0, 0, 1]]
    with Image.open(picture) as image:
        assert min(image.size) > 300


def test_a_report_shows_names_that_are_no_text(tmp_path):
    table, _ = evaluation.write_report(np.eye(2), np.array([1, 0]), ["a", os.fsdecode(b"c\xff")], str(tmp_path))
    with open(table, encoding="utf-8") as f:
        assert {row["class"] for row in csv.DictReader(f)} == {"a", r"c\udcff"}


@pytest.fixture
def weights(tiny_run, tmp_path):
    """Random weights of the tiny run's model."""
    config.reset_cfg()
    config.load_cfg(str(tiny_run))
    torch.manual_seed(0)
    model = builders.build_model()
    torch.nn.init.normal_(model.head.head_fc.weight)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    config.reset_cfg()
    return tmp_path / "w.pth"


def test_a_picture_that_cannot_be_read_counts_nowhere(run_tool, tiny_run, tmp_path, weights):
    for name in "0123456789":
        (tmp_path / "pictures" / "val" / name).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(tmp_path / "pictures" / "val" / name / "a.png")
    (tmp_path / "pictures" / "val" / "3" / "b.png").write_bytes(b"broken")
    done = run_tool("run_net.py", "--mode", "test", "--cfg", tiny_run, "OUT_DIR", tmp_path / "out",
                    "TEST.WEIGHTS", weights, "TEST.DATASET", "imagefolder", "NUM_GPUS", 2,
                    "DATA_LOADER.DATA_DIR", tmp_path / "pictures",
                    "DATA_LOADER.ON_BAD_IMAGE", "replace", "TEST.SAVE_LOGITS", "True")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert np.load(tmp_path / "out" / "logits.npz")["labels"].tolist() == list(range(10))
    assert "on 10 images" in done.stdout
    assert done.stdout.count("Testing leaves out 1 of 11 pictures, which can't be read") == 1


def test_logits_are_the_same_for_any_number_of_processes_and_batch(run_tool, tiny_run, tmp_path, weights):
    found = []
    for i, (processes, batch) in enumerate(((1, 364), (2, 100), (2, 14))):
        out_dir = tmp_path / f"out{i}"
        done = run_tool("run_net.py", "--mode", "test", "--cfg", tiny_run, "OUT_DIR", out_dir, "TEST.WEIGHTS", weights,
                        "NUM_GPUS", processes, "TEST.BATCH_SIZE", batch, "TEST.SAVE_LOGITS", "True",
                        "TEST.REPORT", "True")  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "95% interval" in done.stdout and (out_dir / "confusion.png").exists()
        found.append(np.load(out_dir / "logits.npz"))
    for other in found[1:]:
        assert np.array_equal(found[0]["labels"], other["labels"]) and len(other["labels"]) == 364
        assert np.allclose(found[0]["logits"], other["logits"], atol=1e-5)
