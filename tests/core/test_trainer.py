"""Runs as a user starts them: same numbers, exact resume, fine-tuning, one line for each mistake."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pycls.core import builders, logging, sharding, trainer
from pycls.core.interrupt import StopRequest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def weights(out_dir, epoch=1):
    return torch.load(out_dir / "checkpoints" / f"model_epoch_{epoch:04d}.pyth", weights_only=True)["model_state"]


def records(out_dir, kind):
    return logging.load_log_data(str(out_dir / "stdout.log"))[kind]


ONE = ("OPTIM.MAX_EPOCH", 1)
needs_sharding = pytest.mark.skipif(not sharding.can_shard("cpu"), reason="sharding on the CPU needs PyTorch 2.7")


def test_same_seed_gives_the_same_bits_whatever_the_workers(train):
    a, _ = train("a", *ONE)
    b, _ = train("b", *ONE, "DATA_LOADER.NUM_WORKERS", 2)
    c, _ = train("c", *ONE, "RNG_SEED", 2)
    assert all(torch.equal(x, y) for x, y in zip(weights(a).values(), weights(b).values()))
    assert not all(torch.equal(x, y) for x, y in zip(weights(a).values(), weights(c).values()))


def test_two_processes_compute_what_one_does(train):
    # Not Adam: it would blow up the rounding of gradients that are zero by construction (the keys' bias).
    words = (*ONE, "VIT.DROP_PATH", 0.0, "OPTIM.OPTIMIZER", "sgd", "OPTIM.BASE_LR", 0.1)
    one, _ = train("one", *words)
    two, _ = train("two", *words, "NUM_GPUS", 2, "OPTIM.ACCUM_ITERS", 2)
    for name, value in weights(one).items():
        assert torch.allclose(value, weights(two)[name], atol=1e-6), name
    for kind in ("train_iter", "test_epoch", "test_ema_epoch"):
        for metric in ("top1_err", "loss"):
            if metric in records(one, kind):
                assert records(one, kind)[metric] == pytest.approx(records(two, kind)[metric], abs=2e-3)
    assert records(two, "test_epoch")["samples"] == records(one, "test_epoch")["samples"]


@needs_sharding
def test_sharded_training_computes_what_one_process_does(train):
    words = (*ONE, "VIT.DROP_PATH", 0.0, "OPTIM.OPTIMIZER", "sgd", "OPTIM.BASE_LR", 0.1)
    one, _ = train("one", *words)
    two, done = train("two", *words, "NUM_GPUS", 2, "FSDP.ENABLED", True)
    assert "fully sharded" in done.stdout
    for name, value in weights(one).items():
        assert torch.allclose(value, weights(two)[name], atol=1e-6), name
    assert records(one, "train_iter")["loss"] == pytest.approx(records(two, "train_iter")["loss"], abs=2e-4)


@needs_sharding
def test_a_run_goes_on_with_another_number_of_processes(train):
    # How the states come over is tested bit for bit, every way, in test_parallel.py: this is the command line.
    words = ("VIT.DROP_PATH", 0.0, "OPTIM.OPTIMIZER", "sgd", "OPTIM.BASE_LR", 0.1)
    words += ("OPTIM.LR_POLICY", "steps", "OPTIM.STEPS", [0])
    train("broken", *words, "NUM_GPUS", 2, "FSDP.ENABLED", True, *ONE)
    broken, done = train("broken", *words, "OPTIM.MAX_EPOCH", 2)
    whole, _ = train("whole", *words, "OPTIM.MAX_EPOCH", 2)
    assert "Resuming from" in done.stdout
    for name, value in weights(whole, 2).items():
        assert torch.allclose(value, weights(broken, 2)[name], atol=2e-6), name


def test_test_mode_repeats_the_error_of_training(train, run_tool, tiny_run, tmp_path):
    out_dir, _ = train("run", *ONE)
    found = []
    for processes, sharded in ((1, False), (2, False), (2, sharding.can_shard("cpu")), (1, False)):
        done = run_tool("run_net.py", "--mode", "test", "--cfg", tiny_run, "OUT_DIR", tmp_path / f"test{len(found)}",
                        "TEST.WEIGHTS", out_dir / "model.pyth", "NUM_GPUS", processes,
                        "FSDP.ENABLED", sharded)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "Weights from" in done.stdout and "other values of" not in done.stdout
        found.append(re.search(r"top-1 error ([\d.]+)%.*top-5 error ([\d.]+)%.* on (\d+) images", done.stdout).groups())
    assert len(set(found)) == 1
    best = min(records(out_dir, "test_epoch")["top1_err"][0], records(out_dir, "test_ema_epoch")["top1_err"][0])
    assert float(found[0][0]) == pytest.approx(best, abs=1e-3)


def test_testing_and_timing_beside_a_run_leave_its_log_alone(train, run_tool, tiny_run):
    out_dir, _ = train("run", *ONE)
    log, saved = (out_dir / "stdout.log").read_text(), (out_dir / "config.yaml").read_text()
    words = ("--cfg", tiny_run, "OUT_DIR", out_dir, "TEST.WEIGHTS", out_dir / "model.pyth", "PREC_TIME.NUM_ITER", 1)
    for mode in ("test", "time"):
        assert run_tool("run_net.py", "--mode", mode, *words).returncode == 0
        assert "json_stats" in (out_dir / f"{mode}.log").read_text()
    assert ((out_dir / "stdout.log").read_text(), (out_dir / "config.yaml").read_text()) == (log, saved)


def test_a_finished_run_is_left_alone(train):
    out_dir, _ = train("run", *ONE)
    last = out_dir / "checkpoints" / "model_epoch_0001.pyth"
    before = (last.read_bytes(), last.stat().st_mtime_ns)
    _, done = train("run", *ONE)
    assert "has finished its 1 epochs" in done.stdout
    assert (last.read_bytes(), last.stat().st_mtime_ns) == before


def test_a_new_run_never_writes_over_an_old_one(train):
    out_dir, _ = train("run", *ONE)
    log = (out_dir / "stdout.log").read_text()
    _, done = train("run", *ONE, "TRAIN.AUTO_RESUME", False, code=2)
    assert "already holds checkpoints" in done.stderr and done.stderr.count("\n") == 1
    assert (out_dir / "stdout.log").read_text() == log


def test_resume_goes_on_in_the_same_log_and_names_changed_keys(train):
    train("run", *ONE)
    out_dir, done = train("run", "OPTIM.MAX_EPOCH", 2)
    assert records(out_dir, "train_epoch")["epoch"] == ["1/1", "2/2"]
    assert "OPTIM.MAX_EPOCH (file: 1, config: 2)" in done.stdout


def test_resume_wins_over_starting_weights(train):
    out_dir, _ = train("run", *ONE)
    _, done = train("run", "OPTIM.MAX_EPOCH", 2, "TRAIN.WEIGHTS", out_dir / "model.pyth")
    assert "Resuming from" in done.stdout and "Weights from" not in done.stdout


def test_another_model_is_refused_with_the_differing_keys(train):
    out_dir, _ = train("run", *ONE)
    saved = (out_dir / "config.yaml").read_text()
    _, done = train("run", "VIT.MLP_DIM", 64, "OPTIM.MAX_EPOCH", 2, code=2)
    assert "VIT.MLP_DIM (file: 32, config: 64)" in done.stderr
    assert (out_dir / "config.yaml").read_text() == saved


def test_damaged_checkpoints_are_not_written_over(train):
    out_dir, _ = train("run", *ONE)
    last = out_dir / "checkpoints" / "model_epoch_0001.pyth"
    os.truncate(last, 1000)
    _, done = train("run", *ONE, "NUM_GPUS", 2, code=2)
    assert "to start anew" in done.stderr and done.stderr.count("\n") == 1
    assert last.stat().st_size == 1000


def test_moving_the_output_folder_keeps_resume_working(train):
    out_dir, _ = train("run", *ONE)
    os.rename(out_dir, out_dir.parent / "moved")
    _, done = train("moved", "OPTIM.MAX_EPOCH", 2)
    assert "Resuming from" in done.stdout


ONLY_RANK_0_LISTS = """
from pycls.core import distributed
from pycls.datasets.imagefolder import ImageFolder

find = ImageFolder._from_folders

def find_on_rank_0(self, *args):
    assert distributed.get_rank() == 0
    return find(self, *args)

ImageFolder._from_folders = find_on_rank_0
"""


@pytest.fixture
def three_folders(tmp_path):
    """Digits 0 to 2 as pictures in class folders; the folder."""
    import cv2
    from sklearn.datasets import load_digits

    digits = load_digits()
    for split, rows in (("train", range(0, 400)), ("val", range(400, 500))):
        for i in rows:
            if digits.target[i] < 3:
                folder = tmp_path / "three" / split / f"digit {digits.target[i]}"
                folder.mkdir(parents=True, exist_ok=True)
                cv2.imwrite(str(folder / f"{i}.png"), (digits.images[i] * 15.9).astype("uint8"))
    return tmp_path / "three"


def of_folders(folder):
    return ["MODEL.NUM_CLASSES", 3, "TRAIN.BATCH_SIZE", 32, "TRAIN.DATASET", "imagefolder", "TEST.DATASET",
            "imagefolder", "DATA_LOADER.DATA_DIR", folder]  # fmt: skip


def test_fine_tuning_on_other_classes_and_size(train, three_folders, tmp_path):
    source, _ = train("run", *ONE)
    words = [*of_folders(three_folders), "TRAIN.IM_SIZE", 32, "TEST.IM_SIZE", 32]
    # Two processes, of which only the first may list the folders.
    (tmp_path / "once.py").write_text(ONLY_RANK_0_LISTS)
    words += ["TRAIN.WEIGHTS", source / "model.pyth", "NUM_GPUS", 2, "DATA_LOADER.PIXELS", "uint8"]
    out_dir, done = train("tuned", *ONE, *words, flags=("--plugin", tmp_path / "once.py"))
    assert "head.head_fc.weight (10, 16) in the file, (3, 16) in the model" in done.stdout
    assert "Resized for this image size: pos_embedding from (17, 1, 16) to (65, 1, 16)" in done.stdout
    assert weights(out_dir)["pos_embedding"].shape[0] == 65
    assert json.loads((out_dir / "classes.json").read_text()) == ["digit 0", "digit 1", "digit 2"]
    checkpoint = torch.load(out_dir / "model.pyth", weights_only=True)
    assert checkpoint["class_names"] == ["digit 0", "digit 1", "digit 2"]


def test_renamed_class_folders_are_neither_tested_nor_trained_on(train, three_folders, run_tool, tiny_run):
    out_dir, _ = train("run", *ONE, *of_folders(three_folders))
    names = (out_dir / "classes.json").read_text()
    for split in ("train", "val"):
        os.rename(three_folders / split / "digit 0", three_folders / split / "nought")
    _, resumed = train("run", "OPTIM.MAX_EPOCH", 2, *of_folders(three_folders), code=2)
    tested = run_tool("run_net.py", "--mode", "test", "--cfg", tiny_run, "OUT_DIR", out_dir, "TEST.WEIGHTS",
                      out_dir / "model.pyth", *of_folders(three_folders))  # fmt: skip
    for done, file in ((resumed, "model_epoch_0001.pyth"), (tested, "model.pyth")):
        assert f"{file}: was trained on 3 classes, which are not the 3 of {three_folders}" in done.stderr
        assert "number 0, 'digit 0' in the file and 'digit 1' in the data" in done.stderr
        assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert (out_dir / "classes.json").read_text() == names


def test_class_names_that_are_no_text_read_back_the_same(fresh_cfg, tmp_path):
    fresh_cfg.OUT_DIR = str(tmp_path)
    names = [os.fsdecode(b"c\xff"), "d\u00e9", "\u732b"]
    trainer.write_run_files(names)
    assert json.loads((tmp_path / "classes.json").read_text(encoding="utf-8")) == names


def test_the_documented_plug_in_trains(train):
    plugin = os.path.join(ROOT, "docs", "examples", "plugin.py")
    words = ("MODEL.TYPE", "patch_mlp", "MODEL.LOSS_FUN", "focal", "PATCH_MLP.WIDTH", 8, "NUM_GPUS", 2)
    out_dir, _ = train("run", *ONE, *words, flags=("--plugin", plugin))
    assert weights(out_dir)["embed.weight"].shape == (8, 3, 4, 4)


def test_one_output_folder_holds_one_run_at_a_time(train, tiny_run, tmp_path):
    command = [sys.executable, os.path.join(ROOT, "tools", "run_net.py"), "--mode", "train", "--cfg", str(tiny_run)]
    command += ["OUT_DIR", str(tmp_path / "run"), "OPTIM.MAX_EPOCH", "1000"]
    first = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / "stdout.log").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        _, done = train("run", code=2)
        assert "another run is training" in done.stderr
    finally:
        first.kill()
        first.communicate()
    train("run", *ONE)


def test_logs_hold_pycls_records_and_no_secrets(train, run_tool, tiny_run, tmp_path):
    done = run_tool(
        "run_net.py", "--mode", "train", "--cfg", tiny_run, "OUT_DIR", tmp_path / "run", *ONE, MY_TOKEN="s3cr3t-value"
    )
    assert done.returncode == 0, done.stderr
    data = logging.load_log_data(str(tmp_path / "run" / "stdout.log"))
    assert {"cfg", "complexity", "train_iter", "train_epoch", "test_epoch", "test_ema_epoch"} <= set(data)
    assert {"epoch", "iter", "time_avg", "time_diff", "eta", "top1_err", "top5_err", "loss", "lr", "mem"} <= set(
        data["train_iter"]
    )
    assert "s3cr3t" not in (tmp_path / "run" / "stdout.log").read_text() + done.stdout + done.stderr


def test_time_mode_reports_pycls_figures_and_agrees_with_itself(run_tool, tiny_run, tmp_path):
    done = run_tool(
        "run_net.py", "--mode", "time", "--cfg", tiny_run, "OUT_DIR", tmp_path / "time", "PREC_TIME.NUM_ITER", 3
    )
    assert done.returncode == 0, done.stderr
    data = logging.load_log_data(str(tmp_path / "time" / "stdout.log"))
    assert {"test_fw_time", "train_fw_time", "train_bw_time", "train_fw_bw_time", "train_loader_time"} <= set(
        data["iter_times"]
    )
    timing = {name: values[0] for name, values in data["timing"].items()}
    gflops = 2 * data["complexity"]["flops"][0] / 1e9
    expected = timing["test_images_per_second"] * gflops / 1e3
    assert timing["test_tflops_per_process"] == pytest.approx(expected, rel=0.05, abs=2e-6)
    assert timing["bottleneck"] in ("loader", "model")


class NoSync(TorchDispatchMode):
    """Fails when a value leaves the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(word in str(func) for word in ("_local_scalar_dense", "aten.item", "aten.is_nonzero")), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["fp32", "amp_bf16"])
def test_the_step_never_waits_for_the_device(fresh_cfg, tiny_run, tmp_path, mode):
    fresh_cfg.merge_from_file(str(tiny_run))
    fresh_cfg.merge_from_list(["OUT_DIR", str(tmp_path), "PRECISION.MODE", mode, "VERBOSE", False, "OPTIM.FUSED", True])
    loader = [(torch.rand(8, 3, 16, 16), torch.arange(8)) for _ in range(2)]

    class Loader(list):
        dataset = None

    run = trainer.setup_run(Loader(loader), Loader(loader))
    loss_fun = builders.build_loss_fun()
    with NoSync(), StopRequest() as stop, logging.progress(2) as bar:
        for iteration, (inputs, labels) in enumerate(loader):
            inputs, soft_labels, labels = trainer.prepare_batch(inputs, labels, 0, iteration)
            loss, logits = trainer.training_step(run, loss_fun, inputs, soft_labels)
            run.ema.update(0, iteration)
            run.train_meter.add(loss, logits, labels, 0.1)
            if not run.train_meter.due(iteration):
                trainer.after_step(run, 0, iteration, stop, bar)
