"""Shared fixtures: a clean global config, and the command line run as a user would."""

import os
import subprocess
import sys

import pytest

from pycls.core import config

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture
def fresh_cfg():
    """The global config at its defaults, restored afterwards."""
    config.reset_cfg()
    yield config.cfg
    config.reset_cfg()


@pytest.fixture
def run_tool(tmp_path):
    """Runs `python tools/NAME.py ARGS` in a fresh interpreter and folder; returns the CompletedProcess."""

    def run(name, *args, timeout=300, **env):
        command = [sys.executable, os.path.join(ROOT, "tools", name), *map(str, args)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=tmp_path, env=variables)

    return run
