"""Thirty mistakes, each answered with one line and exit code 2; help and key lists that help."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from pycls.core import cli, config

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture
def command(fresh_cfg, capsys, tiny_run, tmp_path):
    """Runs the command line in this process; {cfg}, {out} and {tmp} stand for paths."""

    def run(*words):
        places = {"cfg": tiny_run, "out": tmp_path / "out", "tmp": tmp_path}
        code = cli.main([str(word).format(**places) for word in words])
        config.cfg.defrost()
        return code, capsys.readouterr()

    return run


TRAIN = ("--mode", "train", "--cfg", "{cfg}", "OUT_DIR", "{out}")
INFO = ("--mode", "info", "--cfg", "{cfg}")
TEST = ("--mode", "test", "--cfg", "{cfg}", "OUT_DIR", "{out}")

MISTAKES = {
    "no mode": (("--cfg", "{cfg}"), "--mode: which mode?"),
    "unknown mode": (("--mode", "trian", "--cfg", "{cfg}"), "did you mean train?"),
    "no config": (("--mode", "train"), "--cfg: which config?"),
    "missing config": (("--mode", "train", "--cfg", "{tmp}/none.yaml"), "none.yaml"),
    "folder as config": (("--mode", "train", "--cfg", "{tmp}"), "can't be read"),
    "unknown flag": (("--mdoe", "train"), "--help"),
    "flag after overrides": ((*TRAIN, "--mode", "test"), "--mode comes too late: flags go before the KEY VALUE words"),
    "config after overrides": (("--mode", "info", "OUT_DIR", "{out}", "--cfg", "{cfg}"), "--cfg comes too late"),
    "unknown key": ((*TRAIN, "OPTIM.LR", "1"), "unknown key OPTIM.LR"),
    "odd words": ((*TRAIN, "NUM_GPUS"), "has no value"),
    "KEY=VALUE": ((*TRAIN, "NUM_GPUS=1", "OPTIM.BASE_LR"), "KEY VALUE"),
    "wrong type": ((*TRAIN, "OPTIM.BASE_LR", "high"), "must be a number"),
    "not allowed": ((*TRAIN, "PRECISION.MODE", "fp8"), "PRECISION.MODE: 'fp8'"),
    "unknown model": ((*TRAIN, "MODEL.TYPE", "vti"), "MODEL.TYPE: unknown value 'vti' (did you mean vit?)"),
    "model of a plug-in": ((*TRAIN, "MODEL.TYPE", "my_net"), "needs --plugin"),
    "unknown loss": ((*TRAIN, "MODEL.LOSS_FUN", "crossentropy"), "did you mean cross_entropy?"),
    "unknown data set": ((*TRAIN, "TRAIN.DATASET", "digit"), "did you mean digits?"),
    "unknown split": ((*TRAIN, "TRAIN.SPLIT", "trian"), "trian"),
    "unknown augmentation": ((*TRAIN, "TRAIN.AUGMENT", "RandAug", "TRAIN.DATASET", "imagefolder"), "TRAIN.AUGMENT"),
    "image and patch": ((*TRAIN, "VIT.PATCH_SIZE", "5"), "16"),
    "heads and width": ((*TRAIN, "VIT.NUM_HEADS", "3"), "VIT.NUM_HEADS"),
    "conv stem lists": ((*TRAIN, "VIT.STEM_TYPE", "conv", "VIT.C_STEM_DIMS", "[8,16]"), "VIT.C_STEM"),
    "too many processes": ((*TRAIN, "NUM_GPUS", "64", "DEVICE", "auto", "MAX_GPUS_PER_NODE", "64"), "NUM_GPUS"),
    "batch and processes": ((*TRAIN, "NUM_GPUS", "3"), "TRAIN.BATCH_SIZE"),
    "no cuda": ((*TRAIN, "DEVICE", "cuda"), "DEVICE"),
    "batch above data set": ((*TRAIN, "TRAIN.BATCH_SIZE", "4096"), "4096"),
    "too few classes": ((*TRAIN, "MODEL.NUM_CLASSES", "7"), "MODEL.NUM_CLASSES"),
    "data not there": ((*TRAIN, "TRAIN.DATASET", "imagenet", "DATA_LOADER.DATA_DIR", "{tmp}/nowhere"), "nowhere"),
    "out dir is a file": (("--mode", "train", "--cfg", "{cfg}", "OUT_DIR", "{cfg}"), "OUT_DIR"),
    "weights missing": ((*TRAIN, "TRAIN.WEIGHTS", "{tmp}/none.pyth"), "none.pyth"),
    "weights not weights": ((*TRAIN, "TRAIN.WEIGHTS", "{cfg}"), "tiny.yaml"),
    "nothing to test": (TEST, "TEST.WEIGHTS: nothing to test"),
    "test weights missing": ((*TEST, "TEST.WEIGHTS", "{tmp}/none.pyth"), "no such checkpoint"),
    "missing plug-in": ((*TRAIN[:2], "--plugin", "{tmp}/no.py", *TRAIN[2:]), "there is no such file"),
    "missing plug-in module": ((*TRAIN[:2], "--plugin", "no_such_module", *TRAIN[2:]), "no such module"),
    "unknown key prefix": (("--list-keys", "OPTIMM"), "did you mean OPTIM?"),
    "nothing to scale by": (("--mode", "scale", "--cfg", "{cfg}"), "scal"),
    "offload": ((*TRAIN, "FSDP.ENABLED", "True", "FSDP.CPU_OFFLOAD", "True"), "FSDP.CPU_OFFLOAD"),
    "uneven machines": ((*TRAIN, "LAUNCH.MODE", "slurm", "NUM_GPUS", "8", "MAX_GPUS_PER_NODE", "3"), "6 and 9"),
    "no time before the signal": ((*TRAIN, "LAUNCH.MODE", "submitit_local", "LAUNCH.TIME_LIMIT", "2"), "SIGNAL_DELAY"),
    "fairscale": ((*INFO, "NUM_GPUS", "2", "FSDP.ENABLED", "True", "FSDP.BACKEND", "fairscale"), "FSDP.BACKEND"),
    "ffcv": ((*TRAIN, "DATA_LOADER.MODE", "ffcv"), "DATA_LOADER.MODE"),
}
# What the config alone tells: no output folder is made for it.
TOLD_FIRST = {"unknown model", "unknown loss", "unknown data set", "image and patch", "heads and width",
              "conv stem lists", "weights missing", "test weights missing", "ffcv"}  # fmt: skip
needs_no_gpu = {"no cuda", "too many processes", "fairscale"}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gives_one_line_and_exit_code_2(command, name):
    if name in needs_no_gpu and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    words, message = MISTAKES[name]
    code, output = command(*words)
    lines = [line for line in output.err.splitlines() if not line.startswith("pycls: warning:")]
    assert code == 2, output
    assert len(lines) == 1 and lines[0].startswith("pycls: error: ") and message in lines[0]


@pytest.mark.parametrize("name", sorted(TOLD_FIRST))
def test_what_the_config_tells_leaves_nothing_behind(command, tmp_path, name):
    code, output = command(*MISTAKES[name][0])
    assert code == 2 and not output.out and not (tmp_path / "out").exists()


def test_a_run_goes_on_without_the_weights_that_it_started_from(command, tmp_path):
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    (tmp_path / "out" / "checkpoints" / "model_epoch_0001.pyth").write_bytes(b"")
    _, output = command(*MISTAKES["weights missing"][0], "TRAIN.BATCH_SIZE", "4096")
    assert "4096" in output.err and "none.pyth" not in output.err


@pytest.mark.parametrize("words", [("MODEL.LOSS_FUN", "of_a_plug_in"), ("TRAIN.DATASET", "of_a_plug_in")])
def test_testing_does_without_what_only_training_needs(command, tiny_run, words):
    code, output = command(*TEST, "TEST.WEIGHTS", "{cfg}", *words)
    assert code == 2 and "tiny.yaml" in output.err and "of_a_plug_in" not in output.err


def test_sharding_is_refused_where_this_pytorch_cannot(command, monkeypatch):
    monkeypatch.setattr(torch.cpu, "Stream", object)
    code, output = command("--mode", "info", "--cfg", "{cfg}", "FSDP.ENABLED", "True", "NUM_GPUS", "2")
    assert code == 2 and "FSDP.ENABLED: True needs PyTorch 2.7" in output.err


def test_info_prints_model_counts_and_plan(command):
    code, output = command("--mode", "info", "--cfg", "{cfg}", "TRAIN.MIXED_PRECISION", "True", "NUM_GPUS", "2")
    assert code == 0
    for text in ("ViT(", "multiply-adds", "precision: amp_bf16 on cpu", "2 processes, data parallel", "64 per process"):
        assert text in output.out


def test_configs_for_eight_gpus_load_anywhere(command):
    code, output = command("--mode", "info", "--cfg", "{cfg}", "NUM_GPUS", "8", "DEVICE", "auto")
    assert code == 0 and ("training would stop here" in output.out or torch.cuda.device_count() >= 8)


def test_keys_are_listed_with_type_default_and_meaning(command):
    code, output = command("--list-keys", "OPTIM.BASE")
    assert code == 0
    assert output.out.startswith("OPTIM.BASE_LR (float, default 0.1)\n    learning rate")


BROKEN_PLUGINS = {
    "import": ("x = 1\nimport no_such_package\n", "line 2: ModuleNotFoundError: No module named 'no_such_package'"),
    "syntax": ("x = 1\n\nclass A(\n", "line 3: SyntaxError: "),
    "exception": ("def f():\n    return 1 / 0\n\nf()\n", "line 2: ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize("name", BROKEN_PLUGINS)
@pytest.mark.parametrize("as_module", [False, True])
def test_a_plug_in_that_cannot_be_imported_is_named_with_its_line(command, tmp_path, monkeypatch, name, as_module):
    text, message = BROKEN_PLUGINS[name]
    (tmp_path / f"broken_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    plugin = f"broken_{name}" if as_module else "{tmp}/" + f"broken_{name}.py"
    code, output = command("--mode", "info", "--plugin", plugin, "--cfg", "{cfg}")
    (line,) = output.err.splitlines()
    assert code == 2 and f"/broken_{name}.py, {message}" in line


def test_help_explains_every_mode(run_tool):
    done = run_tool("run_net.py", "--help")
    assert done.returncode == 0
    assert all(f"  {mode} " in done.stdout for mode in ("info", "train", "test", "time", "scale"))


MODULES = ["pycls", "pycls.models", "pycls.core.config", "pycls.core.builders", "pycls.core.trainer", "pycls.core.net",
           "pycls.core.checkpoint", "pycls.core.optimizer", "pycls.core.benchmark", "pycls.core.meters",
           "pycls.datasets.loader", "pycls.models.model_zoo", "pycls.models.scaler"]  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_each_public_module_can_be_the_first_import(module, tmp_path):
    # cv2 itself puts its folder into LD_LIBRARY_PATH.
    code = f"import os, cv2, torch; before = dict(os.environ); import {module}; assert dict(os.environ) == before"
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], cwd=tmp_path, capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": ROOT})  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_installed_command_is_the_same_program():
    found = shutil.which("pycls", path=os.path.dirname(sys.executable))
    if found is None:
        pytest.skip("pycls is not installed in this environment (pip install -e .)")
    done = subprocess.run([found, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--list-keys" in done.stdout
