"""Records read back as written, logs are never cut, secrets never logged, sinks have a do-nothing twin."""

import json
import math
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch

from pycls.core import logging
from pycls.core.errors import UserError

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def read_back(tmp_path, *lines):
    path = tmp_path / "log.txt"
    path.write_text("\n".join(lines))
    return logging.load_log_data(str(path))


VALUES = {
    "float": (0.1, 0.1),
    "integer": (3, 3),
    "nan": (float("nan"), math.nan),
    "infinite": (float("-inf"), -math.inf),
    "numpy": (np.float32(0.5), 0.5),
    "torch": (torch.tensor(0.25), 0.25),
    "quotes": ('it\'s "so"\\', 'it\'s "so"\\'),
    "lines": ("a\nb", "a\nb"),
    "list": ([1.5, "x"], [1.5, "x"]),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_record_is_one_line_of_strict_json_that_reads_back(tmp_path, name):
    value, expected = VALUES[name]
    line = logging.dump_log_data({"metric": value}, "train_iter")
    assert "\n" not in line

    def refuse(word):
        raise AssertionError(word)

    json.loads(line.split("json_stats: ")[1], parse_constant=refuse)
    got = read_back(tmp_path, f"[trainer.py: 12]: {line}")["train_iter"]["metric"][0]
    assert got == expected or (got != got and expected != expected)


def test_floats_have_four_decimals_and_keys_are_sorted():
    line = logging.dump_log_data({"lr": 0.1, "acc": 12.34567}, "x")
    assert line == 'json_stats: {"_type": "x", "acc": 12.3457, "lr": 0.1000}'


def test_half_lines_and_foreign_lines_are_passed_over(tmp_path):
    good = logging.dump_log_data({"loss": 1.0}, "train_iter")
    data = read_back(tmp_path, "hello", good, good[:30] + good, "json_stats: [1]", good[:-9])
    assert data == {"train_iter": {"loss": [1.0, 1.0]}}


def test_logs_of_pycls_are_read(tmp_path):
    line = ("[meters.py: 152]: json_stats: {\"_type\": \"test_epoch\", \"epoch\": \"2/100\", \"mem\": 5984, "
            "\"min_top1_err\": 50.25, \"time_avg\": 0.2, \"top1_err\": 51.5}")  # fmt: skip
    data = logging.sort_log_data(read_back(tmp_path, line))
    assert data["test_epoch"]["epoch_ind"] == [2] and data["test_epoch"]["epoch_max"] == [100]


def test_a_repeated_epoch_counts_with_its_last_record(tmp_path):
    rows = [
        logging.dump_log_data({"epoch": f"{e}/3", "top1_err": v}, "test_epoch")
        for e, v in ((1, 9.0), (2, 8.0), (2, 7.0))
    ]
    rows += [
        logging.dump_log_data({"epoch": "1/3", "iter": f"{i}/20", "loss": float(i)}, "train_iter") for i in (20, 10)
    ]
    data = logging.sort_log_data(read_back(tmp_path, *rows))
    assert data["test_epoch"]["top1_err"] == [9.0, 7.0]
    assert data["train_iter"]["iter_ind"] == [10, 20]


def test_types_can_be_skipped_and_missing_logs_are_named(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text(logging.dump_log_data({"a": 1}, "x") + "\n" + logging.dump_log_data({"a": 1}, "y"))
    assert list(logging.load_log_data(str(path), data_types_to_skip=["x"])) == ["y"]
    with pytest.raises(UserError, match=r"none\.txt"):
        logging.load_log_data(str(tmp_path / "none.txt"))


@pytest.fixture
def logged(fresh_cfg, tmp_path):
    """Set up logging into tmp_path, removed in the end; returns the log's text."""
    fresh_cfg.OUT_DIR = str(tmp_path)
    yield lambda: (tmp_path / "stdout.log").read_text()
    fresh_cfg.OUT_DIR = ""
    logging.setup_logging()


def test_logs_are_appended_once_and_mended_where_cut(logged, tmp_path):
    (tmp_path / "stdout.log").write_text("half a li")
    for _ in range(2):
        logging.setup_logging()
    logging.get_logger("pycls.x").info("hello")
    assert logged().count("hello") == 1 and logged().startswith("half a li\n")


def test_only_allowed_variables_are_logged(logged, monkeypatch):
    monkeypatch.setenv("MY_API_TOKEN", "s3cr3t")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    logging.setup_logging()
    logging.log_environment()
    assert "OMP_NUM_THREADS=3" in logged() and "s3cr3t" not in logged() and "torch: " in logged()


def test_without_a_terminal_the_progress_bar_shows_nothing(capsys):
    with logging.progress(10, 2, "epoch 1/3") as bar:
        bar.update(1, loss=1.0)
    assert capsys.readouterr().err == ""


def on_a_terminal(code):
    """Runs Python code with standard output and error on one pseudo-terminal; returns what it shows."""
    fcntl, pty, termios = (pytest.importorskip(name) for name in ("fcntl", "pty", "termios"))
    seen = b""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    code = "import sys, time; sys.path.insert(0, sys.argv[1]); from pycls.core import logging\n" + code
    process = subprocess.Popen([sys.executable, "-c", code, ROOT], stdout=child, stderr=child, stdin=child)
    os.close(child)
    while True:
        try:
            data = os.read(parent, 4096)
        except OSError:  # the other end has closed: how a pseudo-terminal says end of file
            break
        if not data:
            break
        seen += data
    os.close(parent)
    assert process.wait() == 0, seen.decode()
    return seen.decode()


def test_the_progress_bar_on_a_terminal_shows_rate_loss_and_what_is_left():
    text = on_a_terminal(
        "with logging.progress(4, 0, 'epoch 1/3') as bar:\n"
        "    for i in range(4): time.sleep(0.6); bar.update(1, loss=0.5 + i)\n"
    )
    assert "epoch 1/3" in text and "loss=1.5" in text and ("it/s" in text or "s/it" in text)


def test_a_line_logged_while_the_bar_is_up_stands_alone():
    text = on_a_terminal(
        "logging.setup_logging()\n"
        "with logging.progress(4, 0, 'epoch 1/3') as bar:\n"
        "    time.sleep(0.6); bar.update(1); logging.get_logger('pycls.x').info('hello')\n"
    )
    # What precedes it on its row of the screen was wiped: the row starts anew at the last carriage return.
    row = next(row for row in text.split("\n") if "hello" in row)
    assert row.rstrip("\r").split("\r")[-1].startswith("[") and row.rstrip("\r").endswith(": hello")


def test_scalars_go_on_after_a_resume_without_a_repeated_step(fresh_cfg, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fresh_cfg.merge_from_list(["OUT_DIR", str(tmp_path), "LOG.TENSORBOARD", True])
    for steps in ((1, 2, 3), (3, 4)):
        writer = logging.scalar_writer()
        for step in steps:
            writer.add("test", {"top1_err": 10.0 * step, "epoch": "1/3"}, step)
        writer.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["test/top1_err"]
    assert [e.step for e in events.Scalars("test/top1_err")] == [1, 2, 3, 4]


def test_scalars_are_off_by_default(fresh_cfg, tmp_path):
    fresh_cfg.OUT_DIR = str(tmp_path)
    logging.scalar_writer().add("test", {"top1_err": 1.0}, 1)
    assert os.listdir(tmp_path) == []
