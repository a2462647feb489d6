"""The ladder: rows build on one another, results are collected honestly, a stopped run goes on, pictures are drawn."""

import json

import pytest
import torch
from PIL import Image

from pycls.core import cli, hardware, ladder
from pycls.core.errors import UserError

TABLE = ladder.rows("cuda", 560)


def result(speed, size=224, processes=1):
    return {"train_images_per_second": speed, "processes": processes, "image_size": size, "train_batch_per_process": 8,
            "precision": "fp32", "peak_memory_mb": 100.0, "mfu_of_measured_peak": 0.5, "device": "a device",
            "commit": "c", "attention_kernels": ["flash"], "torch": "2.x"}  # fmt: skip


@pytest.fixture
def tiny_vit(tmp_path):
    path = tmp_path / "vit.yaml"
    path.write_text("""
MODEL: {TYPE: vit, NUM_CLASSES: 10}
VIT: {PATCH_SIZE: 32, HIDDEN_DIM: 16, MLP_DIM: 16, NUM_HEADS: 2, NUM_LAYERS: 1}
OPTIM: {OPTIMIZER: adamw}
TRAIN: {DATASET: imagenet, IM_SIZE: 224}
PREC_TIME: {NUM_ITER: 1, WARMUP_ITER: 0}
""")
    return path


def test_each_row_changes_only_what_it_says():
    for row in TABLE:
        words = ladder.words_of(row.name, TABLE)
        above = ladder.words_of(row.above, TABLE) if row.above else {}
        assert {k: v for k, v in words.items() if above.get(k) != v} == row.words


def test_everything_is_all_of_ours_and_the_baseline_none():
    words = ladder.words_of("everything", TABLE)
    assert (words["VIT.ATTENTION"], words["OPTIM.FUSED"], words["COMPILE.ENABLED"]) == ("auto", True, True)
    assert (words["VIT.CLASSIFIER_TYPE"], words["PRECISION.MODE"], words["TRAIN.BATCH_SIZE"]) == ("pooled", "bf16", 560)
    assert ladder.words_of("baseline", TABLE)["PRECISION.MODE"] == "amp_fp16"
    assert ladder.words_of("baseline", ladder.rows("cpu", 1))["PRECISION.MODE"] == "fp32"


def test_rows_are_medians_over_rounds_and_ratios_to_the_baseline_of_their_size():
    results = {"baseline": [result(10.0), result(14.0), result(11.0)], "px256": [result(9.0, 256)],
               "baseline_px256": [result(6.0, 256)], "mta": [{"error": "boom"}],
               "sdpa": [result(44.0, processes=2)], "fp16": []}  # fmt: skip
    entries = {e["name"]: e for e in ladder.collect(TABLE, results, {"fp16": "emulated"}, True)}
    assert (entries["baseline"]["images_per_second"], entries["baseline"]["lowest"]) == (11.0, 10.0)
    assert entries["px256"]["ratio"] == 1.5 and entries["sdpa"]["ratio"] == 2.0
    assert entries["mta"]["reason"] == "boom" and entries["fp16"]["reason"] == "emulated"
    assert entries["baseline"]["hours_per_epoch"] == pytest.approx(1_281_167 / 11 / 3600)
    text = ladder.markdown(entries.values(), "T")
    assert "| mta | multi-tensor optimizer | | | | not run | | | | boom |" in text and "11.00 (10.00 to 14.00)" in text


def test_a_batch_that_does_not_fit_is_computed_in_more_passes(fresh_cfg, monkeypatch, tmp_path):
    tried = []

    def time(words, cfg_file, out_dir, extra, grouped):
        tried.append(words["OPTIM.ACCUM_ITERS"])
        if tried[-1] < 4:
            return "pycls: error: rank 1: " + cli._less_memory(torch.OutOfMemoryError("CUDA out of memory. Tried ..."))
        (tmp_path / "timing.json").write_text(json.dumps({**result(10.0), "accumulated_passes": tried[-1]}))
        return ""

    monkeypatch.setattr(ladder, "_time", time)
    measured = ladder.measure("vit.yaml", {}, str(tmp_path), [])
    assert tried == [1, 2, 4]
    (entry,) = ladder.collect(TABLE, {"everything": [measured]}, {}, alone=True)
    assert entry["note"] == "one process: nothing to shard; batch in 4 passes"


def test_another_error_is_not_tried_again(monkeypatch, tmp_path):
    tried = []
    monkeypatch.setattr(ladder, "_time", lambda *args: tried.append(1) or "pycls: error: VIT.NUM_HEADS: ...")
    assert ladder.measure("vit.yaml", {}, str(tmp_path), []) == {"error": "pycls: error: VIT.NUM_HEADS: ..."}
    assert len(tried) == 1


def test_a_ladder_that_is_stopped_shows_what_it_has(monkeypatch, tiny_vit, tmp_path):
    def measure(cfg_file, words, *rest):
        if words["OPTIM.MTA"]:
            raise KeyboardInterrupt
        return result(10.0)

    monkeypatch.setattr(ladder, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        ladder.run(str(tiny_vit), str(tmp_path), TABLE, ["baseline", "mta"], 1, "cuda", 1, [])
    entries = {e["name"]: e for e in json.loads((tmp_path / "ladder.json").read_text())}
    assert entries["baseline"]["ratio"] == 1.0 and entries["mta"]["reason"] == "not measured"
    assert (tmp_path / "ladder.png").exists()


def test_the_tool_measures_draws_and_goes_on(run_tool, tiny_vit, tmp_path):
    words = [
        "--cfg",
        tiny_vit,
        "--out",
        tmp_path / "out",
        "--device",
        "cpu",
        "--batch",
        2,
        "--larger-batch",
        2,
        "--rounds",
        1,
    ]
    done = run_tool("ladder.py", *words, "--steps", "baseline", "fp16", "sdpa")
    assert done.returncode == 0, done.stderr
    entries = {e["name"]: e for e in json.loads((tmp_path / "out" / "ladder.json").read_text())}
    assert entries["fp16"]["reason"] == "fp16 is emulated on the CPU"
    assert entries["baseline"]["attention"] == "softmax of a matrix product" and "flash" in entries["sdpa"]["attention"]
    for name in ("ladder.png", "epoch_time.png"):
        with Image.open(tmp_path / "out" / name) as image:
            assert image.size[0] == 1200
    timing = tmp_path / "out" / "round1" / "sdpa" / "timing.json"
    before = timing.stat().st_mtime_ns
    (tmp_path / "out" / "round1" / "baseline" / "timing.json").unlink()
    again = run_tool("ladder.py", *words, "--steps", "baseline", "fp16", "sdpa")
    assert again.returncode == 0 and timing.stat().st_mtime_ns == before
    assert (tmp_path / "out" / "round1" / "baseline" / "timing.json").exists()


OTHERS = {
    "config": lambda path: path.write_text(path.read_text().replace("NUM_LAYERS: 1", "NUM_LAYERS: 2")),
    "words": lambda path: ["VIT.NUM_HEADS", "1"],
    "rows": lambda path: ladder.rows("cpu", 560),
}


@pytest.mark.parametrize("name", OTHERS)
def test_results_of_other_settings_are_not_taken_for_ones_own(monkeypatch, tiny_vit, tmp_path, name):
    monkeypatch.setattr(ladder, "measure", lambda *args: result(10.0))
    other = OTHERS[name]

    def run(table=TABLE, words=()):
        ladder.run(str(tiny_vit), str(tmp_path), table, ["baseline"], 1, "cuda", 1, words)

    run()
    run()
    arguments = {name: other(tiny_vit)} if name == "words" else {"table": other(tiny_vit)} if name == "rows" else {}
    if name == "config":
        other(tiny_vit)
    with pytest.raises(UserError, match=rf"holds a ladder with other settings \({name}\)"):
        run(**arguments)


def test_words_of_the_config_may_follow_the_rows(run_tool, tiny_vit, tmp_path):
    words = ["--cfg", tiny_vit, "--out", tmp_path / "out", "--device", "cpu", "--rounds", 1, "--batch", 2]
    done = run_tool("ladder.py", *words, "--steps", "baseline", "VIT.NUM_HEADS", 4)
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads((tmp_path / "out" / "ladder.json").read_text())
    assert entry["name"] == "baseline" and entry["ratio"] == 1.0
    assert "NUM_HEADS: 4" in json.loads((tmp_path / "out/round1/baseline/timing.json").read_text())["config"]


def test_a_row_that_fails_is_shown_and_told(run_tool, tiny_vit, tmp_path):
    words = ["--cfg", tiny_vit, "--out", tmp_path / "out", "--device", "cpu", "--rounds", 1, "--batch", 2]
    done = run_tool("ladder.py", *words, "--steps", "baseline", "--batch", 2, "VIT.PATCH_SIZE", 31)
    assert done.returncode == 3 and "not measured, see above why: baseline" in done.stderr
    assert "| not run |" in done.stdout and "VIT.PATCH_SIZE 31" in done.stdout


MISTAKES = {
    "row": (["--steps", "basline"], "did you mean baseline?"),
    "rounds": (["--rounds", "0"], "--rounds"),
    "config": (["--cfg", "none.yaml"], "none.yaml"),
    "another model": (["MODEL.TYPE", "regnet"], "MODEL.TYPE is 'regnet'"),
    "a file for a folder": (["--out", __file__], "test_ladder.py: can't be a folder"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_the_tool_are_one_line(run_tool, tiny_vit, tmp_path, name):
    words, message = MISTAKES[name]
    done = run_tool("ladder.py", "--cfg", tiny_vit, "--out", tmp_path / "o", *words)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


PEAKS = [("NVIDIA H200", "bf16", 989.0), ("Tesla V100-SXM2-16GB", "amp_fp16", 125.0), ("AMD EPYC", "fp32", None),
         ("NVIDIA A100-SXM4-80GB", "tf32", 156.0), ("Tesla V100", "bf16", None)]  # fmt: skip


@pytest.mark.parametrize("name, mode, peak", PEAKS)
def test_vendor_peaks_are_dense_and_by_arithmetic(name, mode, peak):
    assert hardware.vendor_peak(name, mode) == peak
