"""Sharded checkpoints as a user meets them: resumed, tested, converted, damaged, and written beside the training."""

import os
import pickle
import shutil
import threading

import pytest
import torch

from pycls.core import checkpoint, checkpoint_shards
from pycls.core.checkpoint_writer import Writer
from pycls.core.config import cfg

SHARDED = ("NUM_GPUS", 2, "FSDP.ENABLED", True, "FSDP.STATE", "sharded", "TRAIN.CHECKPOINT_ASYNC", True)


# Ends rank 1 while the second epoch is saved, with the files half written.
DIE_WHILE_SAVING = """
import os
from torch.distributed import checkpoint as dcp
from pycls.core import distributed

class Writer(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        if "model_epoch_0002" in str(self.path) and distributed.get_rank() == 1:
            os._exit(9)
        return super().write_data(plan, planner)

dcp.FileSystemWriter = Writer
"""


def test_a_rank_that_dies_while_saving_loses_nothing(train, run_tool, tiny_run, tmp_path):
    (tmp_path / "die.py").write_text(DIE_WHILE_SAVING)
    _, done = train("broken", *SHARDED, code=9, flags=("--plugin", tmp_path / "die.py"))
    assert "Traceback" not in done.stderr
    broken, done = train("broken", *SHARDED)
    assert "Resuming from" in done.stdout and not list((broken / "checkpoints").glob(".*"))
    whole, _ = train("whole", *SHARDED)
    one_file, tested = tmp_path / "one.pyth", []
    convert = run_tool("convert.py", broken / "checkpoints" / "model_epoch_0003.shards", one_file)
    assert convert.returncode == 0, convert.stderr
    a = torch.load(one_file, weights_only=True)
    b = checkpoint.read_checkpoint(str(whole / "checkpoints" / "model_epoch_0003.shards"))
    for name in ("model_state", "ema_state"):
        assert all(torch.equal(value, b[name][key]) for key, value in a[name].items()), name
    assert a["optimizer_state"]["param_groups"] == b["optimizer_state"]["param_groups"]
    for weights in (broken / "model.shards", whole / "model.shards"):
        words = ("--cfg", tiny_run, "OUT_DIR", tmp_path / "test", "TEST.WEIGHTS", weights)
        done = run_tool("run_net.py", "--mode", "test", *words)
        tested.append(done.stdout.splitlines()[-1].partition("Test:")[2].rpartition(",")[0])
    assert tested[0] and tested[0] == tested[1]


@pytest.fixture
def out_dir(fresh_cfg, tmp_path):
    """An OUT_DIR with two sharded checkpoints of one process and the best one."""
    cfg.OUT_DIR, cfg.FSDP.STATE = str(tmp_path / "out"), "sharded"
    model = torch.nn.Linear(40, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    for epoch, error in ((0, 50.0), (1, 40.0)):
        checkpoint.save_checkpoint(model, None, optimizer, epoch, error)
    return tmp_path / "out"


def largest_file(folder):
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "cut short": lambda folder: os.truncate(largest_file(folder), largest_file(folder).stat().st_size // 2),
    "a flipped bit": lambda folder: flip(largest_file(folder)),
    "a missing shard": lambda folder: largest_file(folder).unlink(),
    "no description": lambda folder: (folder / ".metadata").unlink(),
    "half a description": lambda folder: os.truncate(folder / ".metadata", 100),
    # It numbers a value 2**31, and room for so many takes more memory than there is.
    "a greedy description": lambda folder: (folder / ".metadata").write_bytes(b"}r\x00\x00\x00\x80."),
    "no plain data": lambda folder: (folder / "run.pyth").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_is_passed_over(out_dir, damage):
    older, newest = (str(out_dir / "checkpoints" / f"model_epoch_000{n}.shards") for n in (1, 2))
    assert checkpoint.find_resumable() == newest
    DAMAGES[damage](out_dir / "checkpoints" / "model_epoch_0002.shards")
    assert checkpoint.find_resumable() == older


def test_the_best_is_replaced_at_once_and_old_ones_go(out_dir):
    best = out_dir / "model.shards"
    assert checkpoint.read_checkpoint(str(best))["test_err"] == 40.0
    hidden = [path.name for path in out_dir.glob(".model*")]
    assert hidden == [os.readlink(best)] == [".model_0002.shards"]
    shutil.copytree(out_dir / hidden[0], out_dir / ".model_0001.shards")
    (out_dir / "checkpoints" / ".model_epoch_0003.shards.tmp").mkdir()
    checkpoint.remove_leftovers()
    assert [path.name for path in out_dir.glob(".model*")] == hidden
    assert not list((out_dir / "checkpoints").glob(".*"))


def test_clean_up_removes_folders_too(out_dir):
    assert checkpoint.delete_checkpoints(keep=1) == 1
    assert [path.name for path in (out_dir / "checkpoints").iterdir()] == ["model_epoch_0002.shards"]


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_a_crafted_description_runs_no_code(out_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = out_dir / "checkpoints" / "model_epoch_0002.shards"
    (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Evil()}))
    with pytest.raises(checkpoint.UserError, match="posix.mkdir"):
        checkpoint.read_checkpoint(str(folder))
    assert not checkpoint_shards.is_whole(str(folder)) and not (tmp_path / "evil").exists()


def test_a_failed_write_beside_the_training_ends_the_run_in_one_line(train, tmp_path):
    # A file where the folder of the second epoch is to be.
    (tmp_path / "block.py").write_text(
        "from pycls.core import checkpoint\n"
        "write = checkpoint.write_checkpoint\n"
        "def fail(state, path):\n"
        "    if 'epoch_0002' in path:\n"
        "        raise checkpoint.UserError(f'{path}: cannot be written (No space left on device)')\n"
        "    return write(state, path)\n"
        "checkpoint.write_checkpoint = fail\n"
    )
    words = ("TRAIN.CHECKPOINT_ASYNC", True, "TRAIN.CHECKPOINT_ITERS", 0)
    out_dir, done = train("run", *words, code=2, flags=("--plugin", tmp_path / "block.py"))
    assert done.stderr.strip().splitlines()[-1].startswith("pycls: error:") and "No space left" in done.stderr
    assert "Traceback" not in done.stderr
    _, done = train("run", *words)
    assert "Resuming from" in done.stdout and "epoch 2, iteration 1" in done.stdout


def test_a_run_saved_beside_the_training_is_the_same(train):
    at_once, _ = train("at_once")
    beside, _ = train("beside", "TRAIN.CHECKPOINT_ASYNC", True)
    for epoch in (1, 3):
        a, b = (checkpoint.read_checkpoint(str(d / "checkpoints" / f"model_epoch_000{epoch}.pyth"))
                for d in (at_once, beside))  # fmt: skip
        assert all(torch.equal(value, b["model_state"][name]) for name, value in a["model_state"].items())
        assert all(torch.equal(value, b["ema_state"][name]) for name, value in a["ema_state"].items())


@pytest.mark.parametrize("first, then", [("sharded", "full"), ("full", "sharded")])
def test_the_best_outlives_a_change_of_form(fresh_cfg, tmp_path, first, then):
    cfg.OUT_DIR = str(tmp_path / "out")
    model = torch.nn.Linear(4, 4)
    ema, optimizer = torch.nn.Linear(4, 4), torch.optim.SGD(model.parameters())
    cfg.FSDP.STATE = first
    checkpoint.save_checkpoint(model, ema, optimizer, 0, 20.0, 30.0)
    good = {name: value.clone() for name, value in model.state_dict().items()}
    cfg.FSDP.STATE = then
    checkpoint.remove_leftovers()
    torch.nn.init.zeros_(model.weight)
    checkpoint.save_checkpoint(model, ema, optimizer, 1, 50.0, 60.0 if then == "full" else 10.0)
    (best,) = (tmp_path / "out").glob("model.*")
    assert best.suffix == (".shards" if then == "sharded" or first == "sharded" else ".pyth")
    if then == "full":
        # It is still the first one; a better EMA then brings it over, half by half.
        checkpoint.save_checkpoint(model, ema, optimizer, 2, 50.0, 10.0)
        (best,) = (tmp_path / "out").glob("model.*")
        found = checkpoint.read_checkpoint(str(best))
        assert best.suffix == ".pyth" and (found["test_err"], found["ema_err"]) == (20.0, 10.0)
        assert torch.equal(found["model_state"]["weight"], good["weight"])
        assert not list((tmp_path / "out").glob(".model*"))


def test_training_goes_on_while_a_checkpoint_is_written(fresh_cfg):
    cfg.TRAIN.CHECKPOINT_ASYNC = True
    go_on, weight, written = threading.Event(), torch.zeros(2), []

    def save(state, group):
        assert go_on.wait(60)
        written.append((state["a"].clone(), state["b"] is state["a"]))

    with Writer() as writer:
        writer.submit(save, {"a": weight, "b": weight})
        # Here only because the write is under way beside it; and what training changes now must not get into it.
        assert not written
        weight += 1
        go_on.set()
        writer.submit(save, {"a": weight, "b": None})
        assert len(written) >= 1
    assert [(a.tolist(), same) for a, same in written] == [([0.0, 0.0], True), ([1.0, 1.0], False)]
