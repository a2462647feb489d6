"""The scripts under dev/ that can't be seen at work here do run: argument parsing, file outputs, a small dry run."""

import json
import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def run(*words, **env):
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **env}
    return subprocess.run(words, capture_output=True, text=True, env=variables, cwd=ROOT, timeout=300)


def test_gpu_check_runs_dry_on_the_cpu(tmp_path):
    done = run("bash", "dev/gpu_check.sh", "--device", "cpu", "--tiny", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(os.listdir(tmp_path)) == ["ladder_H16.json", "ladder_H16.png", "ladder_sharding.json", "peers.json"]
    rows = {entry["name"]: entry for entry in json.loads((tmp_path / "ladder_H16.json").read_text())}
    assert rows["sdpa"]["ratio"] > 0 and "emulated" in rows["fp16"]["reason"]
    rows = {entry["name"]: entry for entry in json.loads((tmp_path / "ladder_sharding.json").read_text())}
    assert rows["mta"]["ratio"] > 0 and "shard" not in rows["mta"]["note"] and "streams" in rows["fairscale"]["reason"]
    assert "| pooled | 4 | 200 |" in done.stdout and "| token | 11 | 208 |" in done.stdout
    for row in json.loads((tmp_path / "peers.json").read_text()):
        libraries = row["libraries"]
        # The class token is a parameter and a position more than the mean.
        assert libraries["ours, class token"]["parameters"] == libraries["ours"]["parameters"] + 2 * 32
        for name in ("timm", "torchvision", "transformers"):
            result = libraries[name]
            assert "not here: " in result.get("missing", "") or (
                result["parameters"] == libraries["ours, class token"]["parameters"] and result["images_per_second"] > 0
            )


def test_gpu_check_keeps_to_its_time(tmp_path):
    done = run("bash", "dev/gpu_check.sh", "--device", "cpu", "--tiny", OUT=str(tmp_path), LIMIT="12")
    assert done.returncode == 1 and "FAILED (124): other libraries" in done.stderr
    (row,) = (r for r in json.loads((tmp_path / "ladder_H16.json").read_text()) if r["name"] == "fp16")
    assert "emulated" in row["reason"]


def test_gpu_check_refuses_unknown_arguments():
    done = run("bash", "dev/gpu_check.sh", "--devise", "cpu")
    assert done.returncode == 2 and "unknown argument '--devise'" in done.stderr


@pytest.mark.parametrize("how", ["os._exit(9)", "time.sleep(100)"])
def test_a_worker_that_dies_or_hangs_ends_the_test_run_by_name(tmp_path, how):
    if not os.path.exists(os.path.join(sys.prefix, ".pycls-test")):
        pytest.skip("needs an environment that dev/test.sh made, else it would install one")
    for number in range(6):
        ill = f"    if {number == 3} and i == 5:\n        {how}\n"
        text = f"import os, time, pytest\n@pytest.mark.parametrize('i', range(8))\ndef test_it(i):\n{ill}"
        (tmp_path / f"test_{number}.py").write_text(text)
    words = ("bash", "dev/test.sh", "-c", "pyproject.toml", "-o", "faulthandler_timeout=3", "-o", "pythonpath=")
    done = run(*words, str(tmp_path), VIRTUAL_ENV=sys.prefix)
    assert done.returncode == 1 and "crashed while running" in done.stdout, done.stdout + done.stderr
    assert "test_3.py::test_it[5]" in done.stdout and "1 failed" in done.stdout
