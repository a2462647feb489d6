"""What only a GPU can show; skipped by name where there is none."""

import pytest
import torch

from pycls.core import benchmark, builders, trainer
from pycls.core.clock import clock_for

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


class Batches(list):
    dataset = None


@pytest.fixture
def run(fresh_cfg, tiny_run, tmp_path):
    """Builds a training run of the tiny ViT on the GPU with overrides."""

    def make(*words):
        fresh_cfg.merge_from_file(str(tiny_run))
        fresh_cfg.merge_from_list(
            ["DEVICE", "cuda", "OUT_DIR", str(tmp_path), "VERBOSE", False, "OPTIM.FUSED", True, *words]
        )
        batches = Batches([None, None])
        return trainer.setup_run(batches, batches)

    return make


MODES = ["fp32", "tf32", "amp_fp16", "amp_bf16", "fp16", "bf16"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_the_step_never_waits_for_the_device(run, mode, clip):
    training, loss_fun = run("PRECISION.MODE", mode, "OPTIM.GRAD_CLIP", clip), builders.build_loss_fun()
    images, labels = torch.rand(8, 3, 16, 16, device="cuda"), torch.arange(8, device="cuda")
    inputs, soft_labels, labels = trainer.prepare_batch(images, labels, 0, 0)
    trainer.training_step(training, loss_fun, inputs, soft_labels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for iteration in range(2):
            loss, logits = trainer.training_step(training, loss_fun, inputs, soft_labels)
            training.ema.update(5, iteration)
            training.train_meter.add(loss, logits, labels, 0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(loss)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_learns(run, mode):
    training, loss_fun = run("PRECISION.MODE", mode, "OPTIM.BASE_LR", 0.01), builders.build_loss_fun()
    images, labels = torch.rand(16, 3, 16, 16, device="cuda"), torch.arange(16, device="cuda") % 10
    soft_labels = torch.nn.functional.one_hot(labels, 10).float()
    losses = [trainer.training_step(training, loss_fun, images, soft_labels)[0].item() for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]


def test_time_is_the_devices_own(run):
    clock = clock_for(torch.device("cuda"))
    start = clock.mark()
    torch.cuda._sleep(20_000_000)
    end = clock.mark()
    clock.finish()
    assert clock.seconds(start, end) > 0.002


def test_attention_is_a_fused_kernel(run):
    training = run("PRECISION.MODE", "amp_bf16")
    assert any("flash" in name or "cudnn" in name or "efficient" in name
               for name in benchmark.attention_kernels(training.plan, training.precision))  # fmt: skip
