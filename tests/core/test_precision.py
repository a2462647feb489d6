"""Precision modes: each trains, an overflow skips a step and is counted, clipping acts on true gradients."""

import pytest
import torch
from torch import nn

from pycls.core import optimizer as optim
from pycls.core.config import cfg
from pycls.core.ema import ModelEma, copy_for_ema
from pycls.core.errors import UserError
from pycls.core.precision import Precision

CPU = torch.device("cpu")
MODES = ["fp32", "tf32", "amp_fp16", "amp_bf16", "fp16", "bf16"]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))


def batch(scale=1.0):
    generator = torch.Generator().manual_seed(1)
    return scale * torch.randn(32, 8, generator=generator), torch.arange(32) % 4


def clip(parameters):
    nn.utils.clip_grad_norm_(parameters, cfg.OPTIM.GRAD_CLIP)


def train(cfg, mode, steps=30, **keys):
    """Trains the net for some steps; returns (losses, model, optimizer, precision)."""
    cfg.merge_from_list(["OPTIM.OPTIMIZER", "adamw", "OPTIM.BASE_LR", 0.01, "PRECISION.MODE", mode])
    for key, value in keys.items():
        cfg.merge_from_list([key.replace("__", "."), value])
    precision = Precision(device=CPU)
    model = precision.cast(net())
    optimizer = optim.construct_optimizer(model)
    precision.attach(optimizer)
    images, labels = batch()
    losses = []
    for _ in range(steps):
        precision.zero_grad(optimizer)
        loss = nn.functional.cross_entropy(precision.forward(model, images), labels)
        precision.backward(loss)
        precision.step(optimizer, clip)
        losses.append(loss.item())
    return losses, model, optimizer, precision


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_learns_like_fp32(fresh_cfg, mode):
    exact = train(fresh_cfg, "fp32")[0]
    losses, model, _, precision = train(fresh_cfg, mode)
    assert losses[-1] < 0.7 * losses[0] and losses[-1] == pytest.approx(exact[-1], abs=0.05)
    assert precision.forward(model, batch()[0]).dtype is torch.float32


@pytest.mark.parametrize("mode, dtype", [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("norms", [True, False])
def test_pure_modes_store_sixteen_bits_and_step_fp32_masters(fresh_cfg, mode, dtype, norms):
    _, model, optimizer, precision = train(fresh_cfg, mode, steps=2, PRECISION__NORM_FP32=norms)
    assert model[0].weight.dtype is dtype
    assert model[1].weight.dtype is (torch.float32 if norms else dtype)
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(p.dtype is torch.float32 for p in masters)
    exact = precision.exact_weights(model, model.state_dict())
    assert exact["0.weight"].dtype is torch.float32 and torch.equal(exact["0.weight"].to(dtype), model[0].weight)


def test_updates_too_small_for_sixteen_bits_add_up(fresh_cfg):
    *_, precision = train(fresh_cfg, "bf16", steps=0)
    weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1e-4)
    precision.attach(optimizer)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        precision.step(optimizer, clip)
    assert weight.item() == pytest.approx(0.99, abs=0.005)


def test_masters_come_back_from_a_checkpoint(fresh_cfg):
    _, model, _, precision = train(fresh_cfg, "bf16", steps=3)
    exact = {name: value.clone() for name, value in precision.exact_weights(model, model.state_dict()).items()}
    _, other, _, fresh = train(fresh_cfg, "bf16", steps=0)
    other.load_state_dict(exact)
    fresh.load_exact_weights(other, exact)
    again = fresh.exact_weights(other, other.state_dict())
    assert all(torch.equal(exact[name], again[name]) for name in exact)


def overflow(precision, optimizer, model):
    precision.zero_grad(optimizer)
    precision.backward(model(batch()[0]).sum() * float("inf"))
    precision.step(optimizer, clip)


def test_an_overflow_skips_the_step_lowers_the_scale_and_is_counted(fresh_cfg):
    _, model, optimizer, precision = train(fresh_cfg, "amp_fp16", steps=1, PRECISION__LOSS_SCALE=1024.0)
    before = model[0].weight.detach().clone()
    overflow(precision, optimizer, model)
    assert torch.equal(model[0].weight, before)
    assert precision.report() == {"loss_scale": 512.0, "skipped": 1}


def test_too_many_skipped_steps_in_a_row_stop_the_run(fresh_cfg):
    _, model, optimizer, precision = train(fresh_cfg, "amp_fp16", steps=1, PRECISION__MAX_SKIPPED=3)
    for _ in range(2):
        overflow(precision, optimizer, model)
    precision.report()
    overflow(precision, optimizer, model)
    with pytest.raises(UserError, match="skipped 3 steps in a row"):
        precision.report()


def test_a_good_step_starts_the_count_anew(fresh_cfg):
    _, model, optimizer, precision = train(fresh_cfg, "amp_fp16", steps=1, PRECISION__MAX_SKIPPED=2)
    for _ in range(3):
        overflow(precision, optimizer, model)
        precision.zero_grad(optimizer)
        precision.backward(model(batch()[0]).square().mean())
        precision.step(optimizer, clip)
    assert precision.report()["skipped"] == 3


def test_clipping_acts_on_true_gradients_whatever_the_scale(fresh_cfg):
    results = []
    for scale in (2.0, 4096.0):
        # SGD: Adam's step does not feel by how much its gradients are scaled.
        keys = {"OPTIM__OPTIMIZER": "sgd", "OPTIM__BASE_LR": 10.0, "OPTIM__GRAD_CLIP": 0.01}
        _, model, *_ = train(fresh_cfg, "amp_fp16", steps=3, PRECISION__LOSS_SCALE=scale, **keys)
        results.append(model[0].weight.detach())
    assert torch.allclose(*results, atol=2e-3) and not torch.allclose(results[0], net()[0].weight, atol=2e-2)


def test_the_loss_scale_is_saved_and_loads_only_where_there_is_one(fresh_cfg):
    *_, precision = train(fresh_cfg, "amp_fp16", steps=4, PRECISION__LOSS_SCALE=128.0)
    state = precision.state_dict()
    *_, other = train(fresh_cfg, "amp_fp16", steps=0, PRECISION__LOSS_SCALE=2.0)
    other.load_state_dict(state)
    assert other.state_dict() == state
    *_, plain = train(fresh_cfg, "amp_bf16", steps=0)
    plain.load_state_dict(state)
    assert plain.state_dict() == {}
    other.load_state_dict({})
    assert other.state_dict() == state


def test_emulated_modes_say_so(fresh_cfg, caplog):
    Precision("amp_fp16", CPU)
    assert "emulated on the CPU" in caplog.text


def test_ema_follows_formula_copies_in_warm_up_and_counts_integers(fresh_cfg):
    fresh_cfg.merge_from_list(["OPTIM.EMA_ALPHA", 0.01, "TRAIN.BATCH_SIZE", 10, "OPTIM.MAX_EPOCH", 4,
                               "OPTIM.EMA_UPDATE_PERIOD", 2, "OPTIM.WARMUP_EPOCHS", 1])  # fmt: skip
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = ModelEma(copy_for_ema(model), model)
    start = average.module[0].weight.clone()
    with torch.no_grad():
        model[0].weight += 1
        model[1].num_batches_tracked += 5
    average.update(1, 1)
    assert torch.equal(average.module[0].weight, start)
    average.update(1, 2)
    assert torch.allclose(average.module[0].weight, start + 0.01 * 10 / 4 * 2)
    assert average.module[1].num_batches_tracked == 5
    average.update(0, 2)
    assert all(torch.equal(a, b) for a, b in zip(average.module.state_dict().values(), model.state_dict().values()))


def test_without_a_period_there_is_no_ema(fresh_cfg):
    fresh_cfg.OPTIM.EMA_UPDATE_PERIOD = 0
    assert copy_for_ema(net()) is None
    ModelEma(None, net()).update(0, 0)
