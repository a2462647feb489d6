"""What tests of runs that are disturbed share: a slow writer, waiting for the end, comparing what was saved."""

import torch

# Loaded with --plugin: makes the writing of a checkpoint last, and tells the test when it is half done.
SLOW_WRITER = """
import os, time
import torch
whole = torch.save

def slow_save(state, f, **options):
    if options:
        return whole(state, f, **options)
    import io
    buffer = io.BytesIO()
    whole(state, buffer)
    data = buffer.getvalue()
    f.write(data[: len(data) // 2])
    f.flush()
    marker = os.environ["HALF_WRITTEN"]
    if not os.path.exists(marker):
        open(marker, "w").close()
        time.sleep(60)
    f.write(data[len(data) // 2 :])

torch.save = slow_save
"""


def finish(process):
    output = process.communicate(timeout=240)[0].decode()
    assert process.returncode == 0, output
    return output


def assert_same(a, b, path=""):
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{path}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    else:
        assert a == b, path


def assert_same_run(one, other):
    """All that the last and the best checkpoint hold, but for OUT_DIR in the config and the seconds spent."""
    for name in ("checkpoints/model_epoch_0003.pyth", "model.pyth"):
        a, b = (torch.load(folder / name, weights_only=True) for folder in (one, other))
        for state in (a, b):
            del state["cfg"]
            state["meters"]["train"].pop("seconds")
        assert_same(a, b, name)
