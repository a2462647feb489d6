"""Runs as jobs: submitted, followed, put back into the queue, cancelled; on a real SLURM where there is one.

`eval "$(./dev/slurm_local.sh start)"` makes a SLURM of two nodes on this machine, as root; `.ci/run` does it by itself.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, TINY_RUN
from runs import assert_same_run

from pycls.core import cli, config, submit, trainer
from pycls.core.job import Job

# Steps that last long enough to be interrupted; they compute the same.
SLOW_LOSS = """
import os, time
from pycls.core.builders import SoftCrossEntropyLoss, register_loss_fun

class Slow(SoftCrossEntropyLoss):
    def forward(self, *args):
        time.sleep(0.15)
        return super().forward(*args)

register_loss_fun("slow", Slow)
"""

# Kills rank 1 in its seventh step, once: between two checkpoints.
KILL_ONCE = """
import os, signal
from pycls.core.builders import SoftCrossEntropyLoss, register_loss_fun

class Deadly(SoftCrossEntropyLoss):
    steps = 0

    def forward(self, *args):
        Deadly.steps += 1
        if Deadly.steps == 7 and os.environ["RANK"] == "1" and not os.path.exists(os.environ["KILLED"]):
            open(os.environ["KILLED"], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(*args)

register_loss_fun("deadly", Deadly)
"""

# What an interactive job leaves in a shell.
LEFT_OVER = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "5", "SLURM_LOCALID": "3", "SLURM_NTASKS": "8", "SLURM_NODEID": "2",
             "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_RESTART_COUNT": "3"}  # fmt: skip

ON_TWO_NODES = ("LAUNCH.MODE", "slurm", "LAUNCH.FOLLOW", "True", "MAX_GPUS_PER_NODE", "1", "LAUNCH.PARTITION", "batch",
                "LAUNCH.CPUS_PER_GPU", "1", "LAUNCH.MEM_PER_GPU", "1", "LAUNCH.TIME_LIMIT", "10")  # fmt: skip


def start(config_file, out_dir, *words, launcher=(), plugin=None, **env):
    """Starts a training run of two processes."""
    command = [sys.executable, *launcher, os.path.join(ROOT, "tools", "run_net.py"), "--mode", "train"]
    command += [*(("--plugin", str(plugin)) if plugin else ()), "--cfg", str(config_file)]
    command += ["OUT_DIR", str(out_dir), "NUM_GPUS", "2", *words]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output_of(process, code=0):
    output = process.communicate(timeout=240)[0]
    assert process.returncode == code, output
    return output


def wait_for(log, text, process):
    """Waits until the file `log` holds `text`."""
    deadline = time.monotonic() + 120
    while not (log.exists() and text in log.read_text()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{log} never held {text}"
        time.sleep(0.05)


def job_of(out_dir):
    """The number of the job that trains in `out_dir`."""
    (script,) = (out_dir / "jobs").glob("*/*_submission.sh")
    return script.name.split("_")[0]


@pytest.fixture(scope="module")
def cluster():
    """A SLURM of dev/slurm_local.sh."""
    if reason := os.environ.get("PYCLS_NO_SLURM"):
        pytest.skip(f"no SLURM here: {reason}")
    shown = shutil.which("scontrol") and subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True)
    if not shown or shown.returncode or "pycls-local" not in shown.stdout:
        pytest.skip('no SLURM here; as root, eval "$(./dev/slurm_local.sh start)" starts one')


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """(config, OUT_DIR) of a local run in a shell with left-over SLURM variables, which must change nothing."""
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "tiny.yaml").write_text(TINY_RUN)
    output_of(start(folder / "tiny.yaml", folder / "run", **LEFT_OVER))
    return folder / "tiny.yaml", folder / "run"


# ------------------------------------------------------------------------ with SLURM


@pytest.mark.slurm
def test_two_nodes_train_as_one_machine_does(cluster, unbroken, tmp_path):
    out_dir = tmp_path / "a b" / "run"
    output = output_of(start(unbroken[0], out_dir, *ON_TWO_NODES))
    told = r"job (\d+) submitted: 2 node\(s\), 1 process\(es\) on each.*\n.*\n.*tail -F .*\n.*scancel \1"
    assert re.search(told, output)
    assert "RUNNING on n[1-2]" in output and output.rstrip().endswith("COMPLETED")
    assert '"epoch": "3/3"' in output and '"epoch": "3/3"' in (out_dir / "stdout.log").read_text()
    assert_same_run(unbroken[1], out_dir)


@pytest.mark.slurm
def test_a_warned_and_then_pre_empted_job_goes_on_from_where_it_was(cluster, unbroken, tmp_path):
    plugin, out_dir = tmp_path / "slow.py", tmp_path / "run"
    plugin.write_text(SLOW_LOSS)
    log = out_dir / "stdout.log"
    run = start(unbroken[0], out_dir, *ON_TWO_NODES, "MODEL.LOSS_FUN", "slow", plugin=plugin)
    wait_for(log, '"iter": "6/11"', run)
    # The job has its own copy of the code: what is edited meanwhile does not concern it.
    plugin.write_text("raise RuntimeError('edited after submission')")
    subprocess.run(["scancel", "--signal=USR2", job_of(out_dir)], check=True)
    wait_for(log, '"epoch": "2/3"', run)
    subprocess.run(["sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"],
                   check=True, capture_output=True)  # fmt: skip
    output = output_of(run)
    assert output.count("stopped by a signal and saved at epoch") == 2 and output.count("Resuming from") == 2
    assert "restart 1 of at most 3" in output and output.count("SLURM does so itself") == 1
    assert "COMPLETED, restart 2" in output
    assert_same_run(unbroken[1], out_dir)


@pytest.mark.slurm
def test_a_cancelled_job_saves_and_stays_cancelled(cluster, unbroken, tmp_path):
    plugin, out_dir = tmp_path / "slow.py", tmp_path / "run"
    plugin.write_text(SLOW_LOSS)
    run = start(unbroken[0], out_dir, *ON_TWO_NODES, "MODEL.LOSS_FUN", "slow", plugin=plugin)
    wait_for(out_dir / "stdout.log", '"iter": "6/11"', run)
    subprocess.run(["scancel", job_of(out_dir)], check=True)
    output = output_of(run, code=143)
    assert "stopped by a signal and saved at epoch 1" in output and "not put back into the queue" in output
    assert output.rstrip().splitlines()[-1].endswith("CANCELLED")
    (checkpoint,) = (out_dir / "checkpoints").iterdir()
    # Its position follows the last regular one, after six iterations four.
    assert checkpoint.name > "step_0001_000004.pyth"


@pytest.mark.slurm
def test_what_sbatch_refuses_is_one_line(cluster, fresh_cfg, tiny_run, tmp_path, capsys):
    refused = {
        ("LAUNCH.PARTITION", "bach"): "LAUNCH.PARTITION bach: Invalid partition name specified (did you mean batch?)",
        ("LAUNCH.TIME_LIMIT", "9999"): "LAUNCH.TIME_LIMIT 9999",
        ("LAUNCH.MEM_PER_GPU", "60"): "LAUNCH.MEM_PER_GPU 60",
        ("DEVICE", "auto"): "LAUNCH.GPU_TYPE volta",
    }
    for words, message in refused.items():
        config.reset_cfg()
        run = ("--mode", "train", "--cfg", str(tiny_run), "OUT_DIR", str(tmp_path / "out"))
        code = cli.main([*run, *ON_TWO_NODES, *words])
        lines = capsys.readouterr().err.splitlines()
        assert code == 2 and len(lines) == 1 and message in lines[0], lines
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------- without SLURM


def test_a_job_on_this_machine_trains_as_the_plain_run_and_restarts_after_a_warning(unbroken, tmp_path):
    plugin, out_dir = tmp_path / "slow.py", tmp_path / "run"
    plugin.write_text(SLOW_LOSS)
    words = ("LAUNCH.MODE", "submitit_local", "MODEL.LOSS_FUN", "slow")
    run = start(unbroken[0], out_dir, *words, plugin=plugin, **LEFT_OVER)
    wait_for(out_dir / "stdout.log", '"iter": "6/11"', run)
    for pid in _children(_children(run.pid)[0]):
        os.kill(pid, signal.SIGUSR2)
    output = output_of(run)
    assert output.count("restart 1 of at most 3") == 1 and output.count("Resuming from") == 1
    assert_same_run(unbroken[1], out_dir)


def _children(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="utf-8") as f:
        return [int(word) for word in f.read().split()]


def test_a_job_on_this_machine_passes_its_exit_code_on(run_tool, tiny_run, tmp_path):
    done = run_tool("run_net.py", "--mode", "train", "--cfg", tiny_run, "OUT_DIR", tmp_path / "out", "LAUNCH.MODE",
                    "submitit_local", "TRAIN.BATCH_SIZE", 4096)  # fmt: skip
    assert done.returncode == 2 and "pycls: error: TRAIN.BATCH_SIZE" in done.stdout


def test_a_job_is_handed_back_unchanged_and_only_as_often_as_allowed(fresh_cfg):
    first = job = Job(trainer.train_model, config.cfg.dump(), ["my_plugin"], "folder", "cwd")
    for _ in range(config.cfg.LAUNCH.MAX_RETRY):
        job = job.checkpoint().function
    assert job.checkpoint() is None
    assert vars(job) == {**vars(first), "restarts": config.cfg.LAUNCH.MAX_RETRY}


@pytest.mark.parametrize(
    "device, gpu_type, gpus, constraint",
    [
        ("auto", "volta", 8, "volta"),
        ("auto", "gpu:a100", "a100:8", None),
        ("cuda", "", 8, None),
        ("cpu", "volta", None, None),
    ],
)
def test_gpus_are_asked_for_unless_the_device_is_cpu(fresh_cfg, device, gpu_type, gpus, constraint):
    fresh_cfg.merge_from_list(["NUM_GPUS", "16", "DEVICE", device, "LAUNCH.GPU_TYPE", gpu_type])
    asked = submit.slurm_options()
    assert (asked["nodes"], asked["ntasks_per_node"], asked["mem"]) == (2, 8, "480GB")
    assert (asked.get("gpus_per_node"), asked.get("constraint")) == (gpus, constraint)


def test_without_sbatch_it_says_what_to_use(fresh_cfg, tiny_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ("--mode", "train", "--cfg", str(tiny_run), "OUT_DIR", str(tmp_path / "out"), "LAUNCH.MODE", "slurm")
    assert cli.main(list(words)) == 2
    message = capsys.readouterr().err
    assert "no sbatch on PATH" in message and "submitit_local" in message and len(message.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_group_that_torchrun_restarts_goes_on_from_the_last_checkpoint(unbroken, tmp_path):
    plugin, out_dir, killed = tmp_path / "deadly.py", tmp_path / "run", tmp_path / "killed"
    plugin.write_text(KILL_ONCE)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    words = ("MODEL.LOSS_FUN", "deadly")
    output = output_of(start(unbroken[0], out_dir, *words, launcher=launcher, plugin=plugin, KILLED=str(killed)))
    assert killed.exists() and output.count("Resuming from") == 1 and "step_0001_000004.pyth: epoch 1" in output
    assert_same_run(unbroken[1], out_dir)
