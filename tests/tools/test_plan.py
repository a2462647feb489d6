"""The planner from the command line: a screen of text, a JSON and a picture; advice that can be typed; mistakes."""

import json
import os

import pytest
from PIL import Image

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VIT_H = os.path.join(ROOT, "configs", "vit", "ViT-H16_baseline_224.yaml")
TINY = """
MODEL: {TYPE: vit, NUM_CLASSES: 10}
VIT: {PATCH_SIZE: 8, HIDDEN_DIM: 32, MLP_DIM: 64, NUM_HEADS: 2, NUM_LAYERS: 2}
OPTIM: {OPTIMIZER: adamw}
TRAIN: {DATASET: digits, IM_SIZE: 32, BATCH_SIZE: 16}
TEST: {DATASET: digits, IM_SIZE: 32, BATCH_SIZE: 16}
DATA_LOADER: {NUM_WORKERS: 0}
PREC_TIME: {NUM_ITER: 3, WARMUP_ITER: 1}
DEVICE: cpu
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def test_a_vit_h_that_does_not_fit_is_planned_and_the_advice_typed_in(run_tool, tmp_path):
    words = ["plan.py", "--cfg", VIT_H, "--gpu", "v100-16", "--nodes", 2, "--price", 2]
    done = run_tool(*words, "--json", "plan.json", "--plot", "plan.png")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "plan.json").read_text())
    assert (report["gpus"], report["choice"]["batch"], report["choice"]["global_batch"]) == (16, 32, 512)
    assert report["model"]["params"] == 632_199_400 and not report["memory"]["fits"]
    assert sum(report["memory"]["parts_bytes"].values()) == report["memory"]["total_bytes"]
    assert report["cost"] == pytest.approx(2 * report["gpu_hours"])
    assert report["hours"] == pytest.approx(1_281_167 / report["images_per_second"] / 3600 * 100, rel=0.01)
    assert [row["gpus"] for row in report["scaling"]] == [2**i for i in range(11)]
    assert {(r["sharding"], r["checkpoint"]) for r in report["alternatives"]} == {
        (s, c)
        for s in ("DDP", "FSDP, kept gathered", "FSDP", "FSDP, shards of 8")
        for c in ("none", "selective", "block")
    }
    with Image.open(tmp_path / "plan.png") as image:
        assert image.size[0] > 1000
    advice = [str(word) for pair in report["change_that_fits"].items() for word in pair]
    assert "DOES NOT FIT" in done.stdout and " ".join(advice) in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 150 and len(done.stdout.splitlines()) < 30
    again = run_tool(*words, *advice)
    assert again.returncode == 0 and ": fits\n" in again.stdout and "DOES NOT FIT" not in again.stdout


def test_a_timing_of_this_machine_corrects_the_prediction_for_it(run_tool, tiny, tmp_path):
    done = run_tool("run_net.py", "--mode", "time", "--cfg", tiny, "OUT_DIR", "timed", "LOG_DEST", "file")
    assert done.returncode == 0, done.stderr
    timing = json.loads((tmp_path / "timed" / "timing.json").read_text())
    words = ["plan.py", "--cfg", tiny, "--gpu", "cpu", "--images", 1437, "--json", "plan.json"]
    done = run_tool(*words, "--calibrate", "timed/timing.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "plan.json").read_text())
    assert report["step"]["seconds"] == pytest.approx(timing["train_step_seconds_slowest_process"], rel=0.01)
    assert report["calibration"]["file"] == "timed/timing.json" and "Calibrated by" in done.stdout


MISTAKES = {
    "gpu": (["--gpu", "h10"], "--gpu: unknown value 'h10' (did you mean h100?); known: a100-40, a100-80, b200, cpu"),
    "nodes": (["--gpu", "h100", "--nodes", "0"], "--nodes: 0 is too small"),
    "both": (["--gpu", "h100", "--nodes", "1", "--gpus", "8"], "give one of them"),
    "json": (["--gpu", "h100", "--json", "nowhere/plan.json"], "nowhere/plan.json: can't be written"),
    "picture": (["--gpu", "h100", "--plot", "plan.pdf"], "plan.pdf must end with .png"),
    "timing": (["--gpu", "h100", "--calibrate", "none.json"], "none.json: can't be read"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(run_tool, tiny, case):
    words, text = MISTAKES[case]
    done = run_tool("plan.py", "--cfg", tiny, *words)
    assert done.returncode == 2 and text in done.stderr and len(done.stderr.splitlines()) == 1
    assert not done.stdout
