"""The config: every mistake is named, every PyCls config loads, what is saved loads back."""

import os

import pytest
import yaml

from pycls.core import config
from pycls.core.errors import UserError
from pycls.core.options import OPTIONS

# PyCls's defaults that we keep; the three exceptions have their reasons in options.py.
CHANGED_DEFAULTS = {"DIST_BACKEND", "DOWNLOAD_CACHE", "OUT_DIR"}


def write(tmp_path, text, name="c.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_every_option_has_a_meaning_and_a_valid_default(fresh_cfg):
    assert all(option.meaning for option in OPTIONS)
    assert len({option.key for option in OPTIONS}) == len(OPTIONS)
    config.validate_cfg()


@pytest.mark.parametrize(
    "key, value",
    [
        ("OPTIM.BETA2", 0.999),
        ("TRAIN.PCA_STD", 0.1),
        ("BN.NUM_SAMPLES_PRECISE", 8192),
        ("LOG_PERIOD", 10),
        ("TEST.SPLIT", "val"),
    ],
)
def test_pycls_defaults_are_kept(fresh_cfg, key, value):
    assert dict(fresh_cfg.flat())[key] == value


@pytest.mark.parametrize(
    "text, value",
    [("1e-5", 1e-5), ("5E-3", 5e-3), ("1", 1.0), ("0.5", 0.5), ("1_000.0", 1000.0)],
)
def test_numbers_in_yaml_become_floats(fresh_cfg, tmp_path, text, value):
    config.load_cfg(write(tmp_path, f"OPTIM: {{BASE_LR: {text}}}"))
    assert value == fresh_cfg.OPTIM.BASE_LR and type(fresh_cfg.OPTIM.BASE_LR) is float


def test_overrides_take_literals_and_plain_text(fresh_cfg):
    fresh_cfg.merge_from_list(
        ["OPTIM.STEPS", "[0, 30]", "VIT.QK_NORM", "true", "OUT_DIR", r"C:\new\runs", "DESC", "12"]
    )
    assert (fresh_cfg.OPTIM.STEPS, fresh_cfg.VIT.QK_NORM) == ([0, 30], True)
    assert (fresh_cfg.OUT_DIR, fresh_cfg.DESC) == (r"C:\new\runs", "12")


BAD_OVERRIDES = {
    "unknown key": (["OPTIM.BASE_LRR", 1], "unknown key OPTIM.BASE_LRR (did you mean OPTIM.BASE_LR?)"),
    "unknown group": (["OPTIMM.BASE_LR", 1], "did you mean OPTIM.BASE_LR?"),
    "wrong case": (["optim.base_lr", 1], "did you mean OPTIM.BASE_LR?"),
    "text for a number": (["OPTIM.BASE_LR", "fast"], "OPTIM.BASE_LR must be a number, not 'fast'"),
    "fraction for an integer": (["VIT.NUM_LAYERS", "2.5"], "VIT.NUM_LAYERS must be an integer"),
    "number for a switch": (["FSDP.ENABLED", "1"], "FSDP.ENABLED must be True or False"),
    "text for a list": (["OPTIM.STEPS", "30"], "OPTIM.STEPS must be a list"),
    "list of text": (["OPTIM.STEPS", "['a']"], "OPTIM.STEPS must be a list of numbers"),
    "odd number of words": (["NUM_GPUS"], "NUM_GPUS has no value"),
    "KEY=VALUE": (["NUM_GPUS=2", "x"], "write KEY VALUE"),
    "a group": (["OPTIM", 3], "OPTIM is a group of keys"),
    "below a value": (["NUM_GPUS.X", 3], "unknown key NUM_GPUS.X"),
}


@pytest.mark.parametrize("words, message", BAD_OVERRIDES.values(), ids=BAD_OVERRIDES)
def test_bad_override_is_named_with_its_place(fresh_cfg, words, message):
    with pytest.raises(UserError) as error:
        fresh_cfg.merge_from_list(words)
    assert message in str(error.value) and "command line" in str(error.value) and "\n" not in str(error.value)


BAD_FILES = {
    "not YAML": ("OPTIM: [1, 2", "line 1"),
    "not a table": ("- 1\n- 2", "a config is a table"),
    "code": ("DESC: !!python/object/apply:os.system ['echo hacked']", "not valid YAML"),
    "same key twice": ("NUM_GPUS: 1\nNUM_GPUS: 2", "NUM_GPUS stands twice"),
    "unknown key": ("OPTIM: {LR: 1}", "unknown key OPTIM.LR"),
    "empty value": ("OPTIM: {BASE_LR: }", "OPTIM.BASE_LR must be a number"),
}


@pytest.mark.parametrize("text, message", BAD_FILES.values(), ids=BAD_FILES)
def test_bad_file_is_named(fresh_cfg, tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        config.load_cfg(path)
    assert message in str(error.value) and path in str(error.value)


BAD_VALUES = {
    "choice": (["OPTIM.OPTIMIZER", "adamW"], "OPTIM.OPTIMIZER: 'adamW' is not allowed (did you mean adamw?)"),
    "policy": (["OPTIM.LR_POLICY", "cosine"], "allowed: 'cos', 'lin', 'exp', 'steps'"),
    "too small": (["OPTIM.MAX_EPOCH", 0], "OPTIM.MAX_EPOCH: 0 is too small, at least 1"),
    "too large": (["TRAIN.LABEL_SMOOTHING", 1.5], "at most 1.0"),
    "nan": (["OPTIM.BASE_LR", float("nan")], "nan"),
    "infinity": (["OPTIM.BASE_LR", float("inf")], "OPTIM.BASE_LR: inf is not a number that can be used"),
    "seed": (["RNG_SEED", 10**20], "RNG_SEED: 100000000000000000000 is too large, at most 9223372036854775807"),
    "no scaling": (["MODEL.SCALING_FACTOR", 0.0], "MODEL.SCALING_FACTOR: 0.0 is too small, at least 0.01"),
    "endless momentum": (["OPTIM.BETA1", 1.0], "OPTIM.BETA1: 1.0 is too large"),
    "batch not divisible": (["NUM_GPUS", 3, "TRAIN.BATCH_SIZE", 128, "TEST.BATCH_SIZE", 9], "the nearest below is 126"),
    "test batch not divisible": (["NUM_GPUS", 2, "TEST.BATCH_SIZE", 9], "TEST.BATCH_SIZE"),
    "accumulation": (["OPTIM.ACCUM_ITERS", 3], "OPTIM.ACCUM_ITERS 3"),
    "exp to zero": (["OPTIM.LR_POLICY", "exp"], "OPTIM.MIN_LR"),
    "no steps": (["OPTIM.LR_POLICY", "steps"], "must start with 0"),
    "falling steps": (["OPTIM.LR_POLICY", "steps", "OPTIM.STEPS", [0, 9, 3]], "must rise"),
    "nesterov": (["OPTIM.MOMENTUM", 0.0], "OPTIM.NESTEROV"),
    "shard size": (["FSDP.ENABLED", True, "FSDP.SHARD_SIZE", 3, "NUM_GPUS", 4], "FSDP.SHARD_SIZE"),
    "zero in a list": (["VIT.C_STEM_STRIDES", [2, 0]], "VIT.C_STEM_STRIDES: [2, 0] is too small, at least 1"),
    "fraction in a list": (["ANYNET.DEPTHS", [1, 1.5]], "ANYNET.DEPTHS: [1, 1.5] must hold whole numbers"),
    "ports": (["PORT_RANGE", [2, 1]], "PORT_RANGE"),
    "config name": (["CFG_DEST", "../x.yaml"], "CFG_DEST"),
}


@pytest.mark.parametrize("words, message", BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_value_is_refused_before_work_starts(fresh_cfg, words, message):
    fresh_cfg.merge_from_list(words)
    before = fresh_cfg.dump()
    with pytest.raises(UserError) as error:
        config.validate_cfg()
    assert message in str(error.value)
    assert fresh_cfg.dump() == before


@pytest.mark.parametrize(
    "text", ["MEM: {RELU_INPLACE: True}", "OPTIM: {GAMMA: 0.1}", "PORT: 12001", "TRAIN: {EVAL_PERIOD: 1}"]
)
def test_removed_keys_warn_and_load(fresh_cfg, tmp_path, text):
    with pytest.warns(UserWarning, match="ignored"):
        config.load_cfg(write(tmp_path, text))


def test_saved_config_loads_back_to_the_same(fresh_cfg, tmp_path):
    fresh_cfg.merge_from_list(
        ["OUT_DIR", str(tmp_path), "OPTIM.BASE_LR", "1e-5", "OPTIM.STEPS", "[0,1]", "DESC", "it's: #1"]
    )
    path = config.dump_cfg()
    before = dict(fresh_cfg.flat())
    config.reset_cfg()
    config.load_cfg(path)
    assert dict(fresh_cfg.flat()) == before


def test_keys_of_plug_ins_are_accepted(fresh_cfg):
    fresh_cfg.MYNET = config.CfgNode({"WIDTH": 8})
    try:
        fresh_cfg.merge_from_list(["MYNET.WIDTH", "16"])
        assert fresh_cfg.MYNET.WIDTH == 16
    finally:
        del fresh_cfg["MYNET"]


def test_reset_forgets_lists_too(fresh_cfg):
    fresh_cfg.OPTIM.STEPS.append(3)
    config.reset_cfg()
    assert fresh_cfg.OPTIM.STEPS == []


def test_missing_config_file_is_named(fresh_cfg, tmp_path):
    with pytest.raises(UserError, match="nowhere.yaml"):
        config.load_cfg(os.path.join(tmp_path, "nowhere.yaml"))


def test_unsafe_loading_is_refused(fresh_cfg, tmp_path):
    with pytest.raises(UserError, match="safe loader"):
        fresh_cfg.merge_from_file(write(tmp_path, yaml.safe_dump({"NUM_GPUS": 1})), allow_unsafe=True)


def test_a_config_of_another_version_can_be_read_past_its_unknown_keys(fresh_cfg):
    with pytest.warns(UserWarning, match="OPTIM.SHAMPOO is ignored"):
        fresh_cfg.merge_from_text("OPTIM: {SHAMPOO: 1, BASE_LR: 3.0}", "old file", skip_unknown=True)
    assert fresh_cfg.OPTIM.BASE_LR == 3.0
