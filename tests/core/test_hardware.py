"""What the program asks of the machine: memory is kept from step to step."""

import os
import platform
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Pages of memory that the system hands out during five training steps.
COUNT_PAGES = """
import resource, torch
from torch import nn
from pycls.core.hardware import keep_freed_memory
print(keep_freed_memory())
pages = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)])
x = torch.ones(8192, 64)
for i in range(25):
    before = pages() if i == 20 else before if i else 0
    net(x).sum().backward()
print(pages() - before)
"""


def count_pages(**variables):
    """(Whether memory is said to be kept, pages handed out) in a process with these variables."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run([sys.executable, "-c", COUNT_PAGES], capture_output=True, text=True,
                          env={**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT, **variables})  # fmt: skip
    assert done.returncode == 0, done.stderr
    said, pages = done.stdout.split()
    return said == "True", int(pages)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is told to keep memory")
def test_freed_memory_is_kept_unless_the_user_chose_otherwise():
    (kept, few), (chosen, many) = count_pages(), count_pages(MALLOC_TRIM_THRESHOLD_="131072")
    assert kept and not chosen
    assert few < many / 2
