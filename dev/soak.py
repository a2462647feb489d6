"""Kills a run on the digits at many random moments, starts it again each time, and looks whether anything was lost.

    python dev/soak.py                                 # 50 kills of 2 ranks
    python dev/soak.py --kills 200 --seed 7 --fsdp

A kill is a SIGKILL of one rank, of their parent, or of all at once. The moments take turns: while the run starts, in
training steps, while a checkpoint is written (a plug-in makes that last a little) and in the test of an epoch. In the
end the checkpoints are compared bit for bit with those of a run that nobody disturbed, and so are the epochs in the
log. Exit code 0 says that nothing was lost, nothing was left running, and each death was told in one line.
"""

import argparse
import contextlib
import glob
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from pycls.core import logging

CONFIG = """
MODEL: {TYPE: vit, NUM_CLASSES: 10}
VIT: {PATCH_SIZE: 4, HIDDEN_DIM: 16, MLP_DIM: 32, NUM_HEADS: 2, NUM_LAYERS: 2, DROP_PATH: 0.2}
OPTIM: {OPTIMIZER: adamw, BASE_LR: 1e-3, EMA_ALPHA: 1e-3, EMA_UPDATE_PERIOD: 2, GRAD_CLIP: 1.0}
TRAIN: {DATASET: digits, IM_SIZE: 16, BATCH_SIZE: 128, MIXUP_ALPHA: 0.8, CUTMIX_ALPHA: 1.0, CHECKPOINT_ITERS: 4}
TEST: {DATASET: digits, IM_SIZE: 16, BATCH_SIZE: 16}
DATA_LOADER: {NUM_WORKERS: 0}
LOG_PERIOD: 2
LOG: {PLOT: false}
DEVICE: cpu
"""

# Loaded with --plugin: half of a checkpoint is written, then the other half a little later.
SLOW_WRITER = """
import io, time
import torch

whole = torch.save

def slow_save(state, f, **options):
    buffer = io.BytesIO()
    whole(state, buffer, **options)
    data = buffer.getvalue()
    f.write(data[: len(data) // 2])
    f.flush()
    time.sleep(0.1)
    f.write(data[len(data) // 2 :])

torch.save = slow_save
"""

PHASES = ("start", "steps", "saving", "testing")


class Run:
    """A run in a folder of its own, started as often as need be, always by the same command."""

    started: list = []

    def __init__(self, folder: str, args: argparse.Namespace, epochs: int):
        self.out_dir, self.epochs = os.path.join(folder, "run"), epochs
        for name, text in (("soak.yaml", CONFIG), ("slow_writer.py", SLOW_WRITER)):
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, name), "w") as f:
                f.write(text)
        self.command = [sys.executable, os.path.join(ROOT, "tools", "run_net.py"), "--mode", "train",
                        "--plugin", os.path.join(folder, "slow_writer.py"), "--cfg", os.path.join(folder, "soak.yaml"),
                        "OUT_DIR", self.out_dir, "NUM_GPUS", str(args.processes), "FSDP.ENABLED", str(args.fsdp),
                        "OPTIM.MAX_EPOCH", str(epochs)]  # fmt: skip

    def start(self) -> subprocess.Popen:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
        process = subprocess.Popen(self.command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                text=True, start_new_session=True)  # fmt: skip
        Run.started.append(process)
        return process

    def log(self) -> str:
        path = os.path.join(self.out_dir, "stdout.log")
        if not os.path.exists(path):
            return ""
        with open(path, errors="replace") as f:
            return f.read()

    def finished_epochs(self) -> int:
        return len(glob.glob(os.path.join(self.out_dir, "checkpoints", "model_epoch_*.pyth")))

    def half_written(self) -> list:
        return glob.glob(os.path.join(self.out_dir, "**", ".*.pyth.*.tmp"), recursive=True)

    def records(self) -> dict:
        """{(kind, epoch): values that don't depend on the machine}; a repeated epoch must repeat them."""
        found, raw = {}, logging.load_log_data(os.path.join(self.out_dir, "stdout.log"))
        for kind in ("train_epoch", "test_epoch", "test_ema_epoch"):
            metrics = raw[kind]
            for row, epoch in enumerate(metrics["epoch"]):
                values = {m: metrics[m][row] for m in ("loss", "top1_err", "top5_err", "lr", "samples") if m in metrics}
                if found.setdefault((kind, epoch), values) != values:
                    raise SystemExit(f"LOST: epoch {epoch} was repeated with other numbers ({kind})")
        return found


def ranks_of(parent: subprocess.Popen) -> list:
    """Process ids of the ranks that a run has at this moment, in their order."""
    try:
        with open(f"/proc/{parent.pid}/task/{parent.pid}/children") as f:
            children = [int(word) for word in f.read().split()]
    except FileNotFoundError:
        return []
    return [pid for pid in children if b"spawn_main" in _command_line(pid)]


def _command_line(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return f.read()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def wait_for(run: Run, process: subprocess.Popen, phase: str, draw: random.Random, start_seconds: float) -> None:
    """Returns at a random moment of `phase`, or when the run is over."""
    before, count = len(run.log()), draw.randint(1, 4)
    saves, seen = 0, set()
    deadline = time.monotonic() + draw.uniform(0, start_seconds)
    while process.poll() is None:
        new = run.log()[before:]
        if phase == "start" and (time.monotonic() > deadline or '"train_iter"' in new):
            return None
        if phase == "steps" and new.count('"train_iter"') >= 2 * count:
            return time.sleep(draw.uniform(0, 0.05))
        if phase == "testing" and new.count('"train_epoch"') > new.count('"test_epoch"'):
            return time.sleep(draw.uniform(0, 0.04))
        if phase == "saving":
            fresh = set(run.half_written()) - seen
            saves, seen = saves + len(fresh), seen | fresh
            if saves >= count:
                return time.sleep(draw.uniform(0, 0.12))
        time.sleep(0.002)
    return None


def kill(process: subprocess.Popen, draw: random.Random) -> str:
    """Kills a rank, the parent, or all; returns whom."""
    ranks = ranks_of(process)
    victims = [f"rank {i}" for i in range(len(ranks))] * 2 + ["parent", "all"]
    whom = draw.choice(victims)
    try:
        if whom == "all":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            os.kill(process.pid if whom == "parent" else ranks[int(whom.split()[1])], signal.SIGKILL)
    except ProcessLookupError:
        return "nobody"
    return whom


def orphans(process: subprocess.Popen, patience: float = 10.0) -> bool:
    """Whether a process of the run's group still lives after `patience` seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def differences(a, b, path: str = ""):
    """Yields where two checkpoints differ."""
    if type(a) is not type(b):
        yield path
    elif isinstance(a, dict):
        yield from (f"{path}/{key}" for key in a.keys() ^ b.keys())
        for key in a.keys() & b.keys():
            yield from differences(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list):
        yield from [path] if len(a) != len(b) else []
        for i, (x, y) in enumerate(zip(a, b)):
            yield from differences(x, y, f"{path}[{i}]")
    elif not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b):
        yield path


def compare(whole: Run, broken: Run) -> list:
    """Everything that was lost, in words."""
    lost = []
    for name in (os.path.join("checkpoints", f"model_epoch_{whole.epochs:04d}.pyth"), "model.pyth"):
        states = [torch.load(os.path.join(run.out_dir, name), weights_only=True) for run in (whole, broken)]
        for state in states:
            # The folder's name and the seconds spent are the run's own.
            del state["cfg"], state["meters"]["train"]["seconds"]
        lost += [f"{name}: {place} differs" for place in differences(*states)]
    records, expected = broken.records(), whole.records()
    lost += [f"log: {key} is missing" for key in expected.keys() - records.keys()]
    lost += [f"log: {key} differs" for key in expected.keys() & records.keys() if expected[key] != records[key]]
    if broken.finished_epochs() != whole.epochs:
        lost.append(f"{broken.finished_epochs()} epoch checkpoints, not {whole.epochs}")
    lost += [f"left behind: {path}" for path in broken.half_written()]
    return lost


def soak(args: argparse.Namespace, folder: str) -> list:
    """Runs the whole and the broken run; returns what was lost."""
    draw, epochs = random.Random(args.seed), max(3, args.kills // 2)
    whole, broken = (Run(os.path.join(folder, name), args, epochs) for name in ("whole", "broken"))
    began, process = time.monotonic(), whole.start()
    while '"train_iter"' not in whole.log() and process.poll() is None:
        time.sleep(0.05)
    start_seconds = time.monotonic() - began
    errors = process.communicate()[1]
    if process.returncode:
        return [f"the unbroken run failed: {errors}"]
    print(f"unbroken run: {epochs} epochs in {time.monotonic() - began:.0f} s, {start_seconds:.0f} s of it to start")
    lost, tally, half = [], Counter(), 0
    for number in range(1, args.kills + 1):
        # Close to the end only the start is left to be killed: the run must not finish before its last kill.
        phase = PHASES[number % 4] if broken.finished_epochs() < epochs - 2 else "start"
        process = broken.start()
        wait_for(broken, process, phase, draw, start_seconds)
        whom = kill(process, draw)
        errors = process.communicate(timeout=120)[1]
        tally[phase] += 1
        half += bool(broken.half_written())
        if orphans(process):
            lost.append(f"kill {number} ({whom}, {phase}): a process was left running")
        if whom.startswith("rank") and (errors.count("\n") != 1 or "SIGKILL" not in errors or process.returncode != 3):
            lost.append(f"kill {number} ({whom}, {phase}): exit code {process.returncode}, told: {errors!r}")
        print(f"kill {number}/{args.kills}: {whom} in {phase}, {broken.finished_epochs()}/{epochs} epochs done",
              flush=True)  # fmt: skip
    process = broken.start()
    errors = process.communicate()[1]
    if process.returncode:
        return [*lost, f"the last start failed: {errors}"]
    aimed = ", ".join(f"{tally[phase]} in {phase}" for phase in PHASES)
    print(f"{args.kills} kills ({aimed}); {half} of them left a half-written checkpoint; seed {args.seed}")
    return lost + compare(whole, broken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--kills", type=int, default=50, help="how often to kill (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="draws moments and victims")
    parser.add_argument("--fsdp", action="store_true", help="shard the model")
    parser.add_argument("--keep", metavar="FOLDER", help="work there and leave the runs behind")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = args.keep or tempfile.mkdtemp(prefix="soak")
    try:
        lost = soak(args, folder)
    finally:
        for process in Run.started:
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        if not args.keep:
            shutil.rmtree(folder)
    print("\n".join(f"LOST: {line}" for line in lost) or "nothing was lost")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
