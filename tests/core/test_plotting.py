"""Learning curves are real pictures of the numbers in the logs."""

import numpy as np
import pytest
from PIL import Image

from pycls.core import logging, plotting
from pycls.core.errors import UserError


def write_log(folder, epochs=5, error=50.0):
    folder.mkdir(exist_ok=True)
    rows = []
    for e in range(1, epochs + 1):
        common = {"epoch": f"{e}/{epochs}", "top1_err": error / e, "top5_err": error / e / 5}
        train = {**common, "loss": 2.0 / e, "lr": 0.1 / e, "images_per_second": 100.0 + e}
        rows += [logging.dump_log_data(train, "train_epoch"), logging.dump_log_data(common, "test_epoch")]
    (folder / "stdout.log").write_text("\n".join(rows) + '\njson_stats: {"_type": "train_ep')
    return str(folder)


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def test_a_run_is_drawn_beside_its_log(tmp_path):
    path = plotting.plot_run(write_log(tmp_path / "run"))
    image = pixels(path)
    assert path.endswith("curves.png") and image.shape == (864, 1320, 3)
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 20


def test_a_name_of_another_kind_of_file_is_refused(run_tool, tmp_path):
    done = run_tool("plot_log.py", write_log(tmp_path / "run"), "-o", "curves.pdf")
    assert done.returncode == 2 and "curves.pdf must end with .png" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "curves.pdf").exists()


def test_other_numbers_give_another_picture(tmp_path):
    a, b = (plotting.plot_run(write_log(tmp_path / name, error=error)) for name, error in (("a", 50.0), ("b", 30.0)))
    assert not np.array_equal(pixels(a), pixels(b))


def test_one_epoch_is_enough(tmp_path):
    plotting.plot_run(write_log(tmp_path / "run", epochs=1))


def test_logs_of_pycls_and_of_a_test_alone_are_drawn(tmp_path, recwarn):
    folder = tmp_path / "run"
    folder.mkdir()
    for data_type in ("train_epoch", "test_epoch"):
        record = {"epoch": "1/2", "top1_err": 50.0, "loss": 1.0, "lr": 0.1}
        (folder / "stdout.log").write_text(logging.dump_log_data(record, data_type))
        assert pixels(plotting.plot_run(str(folder))).shape == (864, 1320, 3)
    assert not recwarn.list


def test_numbers_that_are_missing_or_not_finite_leave_gaps(tmp_path):
    records = [{"top1_err": 50.0}, {"loss": 1.0}, {"top1_err": float("nan")}, {"top1_err": 40.0, "loss": float("inf")}]
    rows = [logging.dump_log_data({"epoch": f"{e}/4", **r}, "train_epoch") for e, r in enumerate(records, 1)]
    (tmp_path / "stdout.log").write_text("\n".join(rows))
    assert pixels(plotting.plot_run(str(tmp_path))).shape == (864, 1320, 3)


def test_a_log_without_the_metric_is_named(tmp_path):
    log = tmp_path / "stdout.log"
    log.write_text(logging.dump_log_data({"epoch": "1/4", "loss": 1.0}, "train_epoch"))
    with pytest.raises(UserError, match="has no top5_err"):
        plotting.plot_error_curves([str(log)], ["a"], str(tmp_path / "curves.png"), "top5_err")


def test_the_tool_compares_runs(run_tool, tmp_path):
    logs = [write_log(tmp_path / name, error=error) for name, error in (("a", 50.0), ("b", 30.0))]
    done = run_tool("plot_log.py", *logs, "--names", "first", "second", "-o", tmp_path / "both.png")
    assert done.returncode == 0, done.stderr
    assert pixels(tmp_path / "both.png").shape == (864, 1320, 3)


MISTAKES = {
    "missing log": (["{tmp}/none"], "there is no such log"),
    "no records": (["{tmp}/empty.log"], "holds no finished epoch"),
    "names": (["{tmp}/run", "--names", "a", "b"], "2 names for 1 logs"),
    "output": (["{tmp}/run", "-o", "{tmp}/nowhere/curves.png"], "nowhere/curves.png: can't be written"),
    "metric": (["{tmp}/run", "--metric", "loss"], "--metric"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_the_tool_are_one_line(run_tool, tmp_path, name):
    write_log(tmp_path / "run")
    (tmp_path / "empty.log").write_text("hello\n")
    words, message = MISTAKES[name]
    done = run_tool("plot_log.py", *[word.format(tmp=tmp_path) for word in words])
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_equal_folder_names_are_told_apart(tmp_path):
    paths = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    for path in paths:
        path.mkdir(parents=True)
    assert plotting.names_of(list(map(str, paths))) == ["a/run", "b/run"]
    with pytest.raises(UserError):
        plotting.log_file_of("/nowhere/at/all")
