"""Checkpoints: whole or absent, found again, refused with reasons."""

import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from pycls.core import checkpoint, fitting
from pycls.core.errors import UserError


def net(classes=3, width=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Linear(width, classes))


def optimizer_of(model, groups=1):
    parameters = list(model.parameters())
    return torch.optim.SGD([{"params": parameters[i::groups]} for i in range(groups)], lr=0.1, momentum=0.9)


def stepped(model, optimizer):
    model(torch.randn(8, 5)).square().mean().backward()
    optimizer.step()
    return model


@pytest.fixture
def out_dir(fresh_cfg, tmp_path):
    fresh_cfg.OUT_DIR = str(tmp_path)
    return tmp_path


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))


def test_what_is_saved_comes_back(out_dir):
    model, ema = net(), net()
    optimizer = optimizer_of(model)
    stepped(model, optimizer)
    path = checkpoint.save_checkpoint(model, ema, optimizer, 4, 30.0, 20.0)
    assert os.path.basename(path) == "model_epoch_0005.pyth" and os.path.exists(out_dir / "model.pyth")
    new, new_ema = net(), net()
    new_optimizer = optimizer_of(new)
    assert checkpoint.load_checkpoint(path, new, new_ema, new_optimizer) == (4, 30.0, 20.0)
    assert same(model, new) and same(ema, new_ema)
    buffers = [s["momentum_buffer"] for s in new_optimizer.state_dict()["state"].values()]
    assert all(torch.equal(a, s["momentum_buffer"]) for a, s in zip(buffers, optimizer.state_dict()["state"].values()))


@pytest.mark.parametrize("test_err, ema_err, takes_ema", [(30.0, 20.0, True), (20.0, 30.0, False), (20.0, 20.0, False)])
def test_a_lone_model_gets_the_better_state(out_dir, test_err, ema_err, takes_ema):
    model, ema = net(), net()
    stepped(ema, optimizer_of(ema))
    path = checkpoint.save_checkpoint(model, ema, optimizer_of(model), 0, test_err, ema_err)
    got = net()
    checkpoint.load_checkpoint(path, got)
    assert same(got, ema if takes_ema else model)


def test_best_keeps_model_and_ema_each_at_its_own_best(out_dir):
    models = []
    for epoch, (test_err, ema_err) in enumerate([(50.0, 40.0), (30.0, 45.0), (35.0, 20.0)]):
        model, ema = net(), net()
        for p in (*model.parameters(), *ema.parameters()):
            p.data += epoch
        models.append((model, ema))
        checkpoint.save_checkpoint(model, ema, optimizer_of(model), epoch, test_err, ema_err)
    best = checkpoint.read_checkpoint(checkpoint.get_checkpoint_best())
    assert (best["test_err"], best["ema_err"]) == (30.0, 20.0)
    assert torch.equal(best["model_state"]["0.weight"], models[1][0][0].weight)
    assert torch.equal(best["ema_state"]["0.weight"], models[2][1][0].weight)


def test_without_ema_the_weights_are_stored_once(out_dir):
    model = nn.Linear(1000, 100)
    path = checkpoint.save_checkpoint(model, None, torch.optim.SGD(model.parameters()), 0)
    assert os.path.getsize(path) < 1.2 * 4 * 100_100


def test_the_furthest_checkpoint_is_the_last(out_dir):
    model = net()
    for epoch in (0, 1):
        checkpoint.save_checkpoint(model, None, optimizer_of(model), epoch)
    state = checkpoint.read_checkpoint(checkpoint.get_last_checkpoint())
    step = checkpoint.save_step(state, 2, 7)
    assert checkpoint.get_last_checkpoint() == step
    later = checkpoint.save_step(state, 2, 11)
    assert checkpoint.get_last_checkpoint() == later and not os.path.exists(step)
    checkpoint.save_checkpoint(model, None, optimizer_of(model), 2)
    assert os.path.basename(checkpoint.get_last_checkpoint()) == "model_epoch_0003.pyth" and not os.path.exists(later)


def damage_cut(path):
    os.truncate(path, os.path.getsize(path) * 2 // 3)


def damage_flip(path):
    with open(path, "r+b") as f:
        f.seek(os.path.getsize(path) // 2)
        byte = f.read(1)
        f.seek(-1, 1)
        f.write(bytes([byte[0] ^ 255]))


def damage_empty(path):
    os.truncate(path, 0)


@pytest.mark.parametrize("damage", [damage_cut, damage_flip, damage_empty])
def test_a_damaged_newest_is_passed_over(out_dir, damage, caplog):
    model = nn.Linear(300, 300)
    paths = [checkpoint.save_checkpoint(model, None, torch.optim.SGD(model.parameters()), e) for e in (0, 1)]
    damage(paths[1])
    assert checkpoint.find_resumable() == paths[0]
    assert "model_epoch_0002.pyth is damaged" in caplog.text


@pytest.mark.parametrize("damage, reason", [
    (damage_cut, "is damaged or no checkpoint"), (damage_flip, "a checksum in it is wrong"), (damage_empty, "damaged"),
])  # fmt: skip
def test_where_none_is_whole_the_newest_is_named(out_dir, damage, reason):
    model = nn.Linear(300, 300)
    for epoch in (0, 1):
        damage(checkpoint.save_checkpoint(model, None, torch.optim.SGD(model.parameters()), epoch))
    with pytest.raises(UserError, match=rf"found: 2\) .*model_epoch_0002.pyth: .*{reason}.* to start anew"):
        checkpoint.find_resumable()


def test_a_failed_write_leaves_the_old_file(out_dir, monkeypatch):
    model = net()
    path = checkpoint.save_checkpoint(model, None, optimizer_of(model), 0)
    before = Path(path).read_bytes()

    def disk_full(state, f):
        f.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", disk_full)
    with pytest.raises(UserError, match="No space left on device"):
        checkpoint.write_checkpoint({}, path)
    assert Path(path).read_bytes() == before
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


def test_clean_up_keeps_the_last(out_dir):
    model = net()
    for epoch in range(4):
        checkpoint.save_checkpoint(model, None, optimizer_of(model), epoch)
    assert checkpoint.delete_checkpoints(keep=1) == 3
    assert [os.path.basename(p) for p in checkpoint.list_checkpoints()] == ["model_epoch_0004.pyth"]


WRAPPERS = ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "model.", ""]


@pytest.mark.parametrize("prefix", WRAPPERS)
def test_bare_weights_load_through_wrapper_names(fresh_cfg, tmp_path, prefix):
    source, got = stepped(net(), optimizer_of(net())), net()
    source[0].weight.data += 1
    torch.save({prefix + k: v for k, v in source.state_dict().items()}, tmp_path / "w.pth")
    checkpoint.load_weights(str(tmp_path / "w.pth"), got)
    assert same(source, got)


def test_a_head_for_other_classes_is_left_and_logged(fresh_cfg, tmp_path, caplog):
    caplog.set_level("INFO")
    source, got = net(classes=3), net(classes=7)
    source[0].weight.data += 1
    head = got[2].weight.clone()
    torch.save(source.state_dict(), tmp_path / "w.pth")
    checkpoint.load_weights(str(tmp_path / "w.pth"), got)
    assert torch.equal(got[0].weight, source[0].weight) and torch.equal(got[2].weight, head)
    assert "2.weight (3, 4) in the file, (7, 4) in the model" in caplog.text


def test_weights_that_match_nothing_are_refused(fresh_cfg, tmp_path):
    torch.save({"encoder.w": torch.zeros(2)}, tmp_path / "w.pth")
    with pytest.raises(UserError, match="nothing in it matches"):
        checkpoint.load_weights(str(tmp_path / "w.pth"), net())


def test_weights_for_less_than_half_of_the_model_are_refused(fresh_cfg, tmp_path):
    torch.save({"0.bias": torch.zeros(4), "2.weight": torch.zeros(3, 4)}, tmp_path / "w.pth")
    with pytest.raises(UserError, match="only 2 of the model's 9 tensors, less than half of its weights"):
        checkpoint.load_weights(str(tmp_path / "w.pth"), net())


def test_a_classifier_that_is_most_of_the_model_may_start_anew(fresh_cfg, tmp_path):
    torch.save(net(classes=3).state_dict(), tmp_path / "w.pth")
    checkpoint.load_weights(str(tmp_path / "w.pth"), net(classes=3000))


@pytest.mark.parametrize("load", [checkpoint.load_weights, checkpoint.load_checkpoint])
def test_safetensors_are_bare_weights(fresh_cfg, tmp_path, load):
    safetensors = pytest.importorskip("safetensors.torch")
    source, got = stepped(net(), optimizer_of(net())), net()
    source[0].weight.data += 1
    safetensors.save_file(source.state_dict(), tmp_path / "w.safetensors")
    load(str(tmp_path / "w.safetensors"), got)
    assert same(source, got)


def test_damaged_safetensors_are_refused(fresh_cfg, tmp_path):
    pytest.importorskip("safetensors")
    (tmp_path / "w.safetensors").write_text("hello, hello")
    assert "can't be read as safetensors" in refused(tmp_path / "w.safetensors", net())


def test_safetensors_without_the_package_say_what_to_install(fresh_cfg, tmp_path, monkeypatch):
    (tmp_path / "w.safetensors").write_text("")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "pip install 'pycls[export]'" in refused(tmp_path / "w.safetensors", net())


def refused(path, *args):
    with pytest.raises(UserError) as error:
        checkpoint.load_checkpoint(str(path), *args)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def test_bad_files_are_each_refused_with_their_reason(fresh_cfg, tmp_path):
    model = net()
    assert "no such checkpoint" in refused(tmp_path / "none.pyth", model)
    assert "is a folder" in refused(tmp_path, model)
    (tmp_path / "text.pyth").write_text("hello")
    assert "is not a checkpoint" in refused(tmp_path / "text.pyth", model)
    (tmp_path / "net.onnx").write_bytes(b"\x08\x07\x12\x07pytorch")
    assert "is not a checkpoint" in refused(tmp_path / "net.onnx", model)
    torch.save([1, 2], tmp_path / "list.pyth")
    assert "holds a list" in refused(tmp_path / "list.pyth", model)
    torch.save({"epoch": 3}, tmp_path / "no_weights.pyth")
    assert "holds no tensors" in refused(tmp_path / "no_weights.pyth", model)
    torch.save({"layer._flat_param": torch.zeros(9)}, tmp_path / "shard.pyth")
    assert "one shard" in refused(tmp_path / "shard.pyth", model)
    torch.save(net(width=9).state_dict(), tmp_path / "wide.pyth")
    assert "0.weight is (9, 5) in the file and (4, 5) in the model" in refused(tmp_path / "wide.pyth", model)


class Crafted:
    """Unpickles into a call."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (self.marker, "w"))


def test_a_crafted_file_runs_no_code(fresh_cfg, tmp_path):
    marker = str(tmp_path / "ran")
    torch.save({"model_state": Crafted(marker)}, tmp_path / "zip.pyth")
    with open(tmp_path / "old.pyth", "wb") as f:
        pickle.dump(Crafted(marker), f)
    assert "run code" in refused(tmp_path / "zip.pyth", net())
    refused(tmp_path / "old.pyth", net())
    assert not os.path.exists(marker)


def test_optimizer_groups_of_another_kind_are_refused_with_both(out_dir):
    model = net()
    path = checkpoint.save_checkpoint(model, None, optimizer_of(model), 0)
    other = net()
    message = refused(path, other, net(), optimizer_of(other, groups=2))
    assert "[6] tensors" in message and "[3, 3]" in message and "TRAIN.WEIGHTS" in message


def adamw_of(model):
    return torch.optim.AdamW(model.parameters())


def adam_of(model):
    return torch.optim.Adam(model.parameters())


def saved_with(model, make):
    optimizer = make(model)
    stepped(model, optimizer)
    return checkpoint.save_checkpoint(model, None, optimizer, 0)


@pytest.mark.parametrize("before, after", [(optimizer_of, adamw_of), (adamw_of, optimizer_of)])
def test_another_optimizers_state_is_refused(out_dir, before, after):
    path, other = saved_with(net(), before), net()
    message = refused(path, other, net(), after(other))
    assert "sgd" in message and "adam or adamw" in message and "OPTIM.OPTIMIZER" in message


def test_a_state_that_two_optimizers_left_is_refused(out_dir):
    path, other = saved_with(net(), adamw_of), net()
    content = checkpoint.read_checkpoint(path)
    content["optimizer_state"]["param_groups"] = optimizer_of(other).state_dict()["param_groups"]
    checkpoint.write_checkpoint(content, path)
    assert "that of sgd and adam or adamw and" in refused(path, other, net(), optimizer_of(other))


def test_adam_and_adamw_take_over_from_each_other(out_dir):
    path, other = saved_with(net(), adam_of), net()
    optimizer = adamw_of(other)
    checkpoint.load_checkpoint(path, other, net(), optimizer)
    assert "exp_avg" in optimizer.state_dict()["state"][0]


def test_another_architecture_names_the_differing_keys(out_dir, fresh_cfg):
    fresh_cfg.merge_from_list(["MODEL.TYPE", "vit", "MODEL.NUM_CLASSES", 3])
    model = net(classes=3)
    path = checkpoint.save_checkpoint(model, None, optimizer_of(model), 0)
    fresh_cfg.MODEL.NUM_CLASSES = 5
    assert "MODEL.NUM_CLASSES (file: 3, config: 5)" in refused(path, net(classes=5))


@pytest.mark.parametrize("key, value", [("VIT.NUM_HEADS", 8), ("LN.EPS", 1e-3), ("DATA_LOADER.CHANNEL_ORDER", "rgb")])
def test_a_test_names_changed_keys_that_change_its_result(fresh_cfg, caplog, key, value):
    fresh_cfg.MODEL.TYPE = "vit"
    content = {"model_state": {}, "cfg": fresh_cfg.dump()}
    old = dict(fresh_cfg.flat())[key]
    fresh_cfg.merge_from_list([key, value])
    fitting.log_tested(content, 0, "a.pyth")
    assert f"a.pyth was trained with other values of {key} (file: {old}, config: {value})" in caplog.text


@pytest.mark.parametrize("stored", [{}, {"class_names": None}, {"class_names": ["a", "b"]}])
def test_classes_that_agree_or_are_unknown_are_accepted(stored):
    fitting.check_class_names(stored, ("a", "b"), "pictures", "a.pyth", "")
    fitting.check_class_names(stored, None, "pictures", "a.pyth", "")


@pytest.mark.parametrize("names, difference", [
    (["b", "a"], "number 0, 'a' in the file and 'b' in the data"),
    (["a"], "number 1, 'b' in the file and none in the data"),
    (["a", "b", "c"], "number 2, none in the file and 'c' in the data"),
])  # fmt: skip
def test_other_classes_are_refused_with_the_first_that_differs(names, difference):
    with pytest.raises(UserError, match=f"a.pyth: was trained on 2 classes, .* of pictures: .*{difference}. Mend it"):
        fitting.check_class_names({"class_names": ["a", "b"]}, names, "pictures", "a.pyth", "Mend it")


QUIET = ["VIT.LAYOUT", "batch_first", "VIT.DROP_PATH", 0.5, "VIT.ATTENTION", "math", "TEST.BATCH_SIZE", 7, "DEVICE",
         "cpu", "MODEL.LOSS_FUN", "focal", "REGNET.DEPTH", 3]  # fmt: skip


def test_a_test_is_silent_about_keys_that_do_not_change_its_result(fresh_cfg, caplog):
    fresh_cfg.MODEL.TYPE = "vit"
    content = {"model_state": {}, "cfg": fresh_cfg.dump()}
    fresh_cfg.merge_from_list(QUIET)
    fitting.log_tested(content, 0, "a.pyth")
    assert "other values" not in caplog.text


@pytest.mark.parametrize("ema_err, whose", [(20.0, "the EMA's"), (40.0, "the model's")])
def test_a_test_says_which_weights_it_took(fresh_cfg, caplog, ema_err, whose):
    caplog.set_level("INFO")
    content = {"model_state": {}, "ema_state": {}, "test_err": 30.0, "ema_err": ema_err}
    fitting.log_tested(content, 31, "a.pyth")
    assert f"Weights from a.pyth: {whose} (test error in the file: model 30%, EMA {ema_err:.0f}%)" in caplog.text
    assert "all 31 tensors match" in caplog.text


def test_checkpoints_hold_plain_data_only(out_dir):
    model = net()
    path = checkpoint.save_checkpoint(model, net(), optimizer_of(model), 0)
    state = torch.load(path, weights_only=True)
    assert {"epoch", "test_err", "ema_err", "model_state", "ema_state", "optimizer_state", "cfg"} <= set(state)
