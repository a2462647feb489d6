"""Errors are exact, medians are PyCls's, and nothing leaves the device between log periods."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pycls.core import meters
from pycls.core.errors import UserError

CPU = torch.device("cpu")


def logits_with(labels, correct, classes=6):
    """Logits whose best class is the label where `correct`, else another."""
    best = torch.where(correct, labels, (labels + 1) % classes)
    return torch.nn.functional.one_hot(best, classes).float()


@pytest.mark.parametrize("classes", [2, 3, 4, 5, 1000])
def test_top_k_is_capped_at_the_number_of_classes(classes):
    logits, labels = torch.randn(10, classes), torch.zeros(10, dtype=torch.long)
    top1, top5 = meters.topk_errors(logits, labels, [1, 5])
    assert top1 == pytest.approx(100 * (logits.argmax(1) != 0).float().mean().item())
    assert top5.item() == 0 if classes <= 5 else top5 <= top1


def test_padding_is_never_counted(fresh_cfg):
    meter = meters.TestMeter(2, CPU)
    labels = torch.tensor([0, 1, 2, 3])
    meter.add(logits_with(labels, torch.tensor([True, True, True, False])), labels)
    padded = torch.tensor([4, -1, -1, -1])
    meter.add(logits_with(padded.clamp(min=0), torch.tensor([False] * 4)), padded)
    meter.flush()
    stats = meter.log_epoch_stats(0)
    assert stats["samples"] == 5 and stats["top1_err"] == pytest.approx(40.0)


def test_epoch_is_the_mean_over_samples_and_a_record_the_median_over_steps(fresh_cfg):
    fresh_cfg.LOG_PERIOD = 3
    meter = meters.TrainMeter(3, CPU)
    labels = torch.arange(4)
    for wrong, loss in ((0, 1.0), (1, 2.0), (4, 9.0)):
        meter.add(torch.tensor(loss), logits_with(labels, torch.arange(4) >= wrong), labels, lr=0.1)
    assert meter.due(2)
    meter.flush(0, 2)
    record, epoch = meter.get_iter_stats(0, 2), meter.get_epoch_stats(0)
    assert (record["loss"], record["top1_err"]) == (2.0, 25.0)
    assert epoch["loss"] == 4.0 and epoch["top1_err"] == pytest.approx(100 * 5 / 12)
    assert (record["epoch"], record["iter"]) == ("1/200", "3/3")


def test_minimum_is_kept_over_epochs_and_a_restart(fresh_cfg):
    labels, first = torch.arange(4), meters.TestMeter(1, CPU)
    first.add(logits_with(labels, torch.ones(4, dtype=bool)), labels)
    first.flush()
    first.log_epoch_stats(0)
    second = meters.TestMeter(1, CPU)
    second.load_state_dict(first.state_dict())
    second.add(logits_with(labels, torch.zeros(4, dtype=bool)), labels)
    second.flush()
    stats = second.log_epoch_stats(1)
    assert (stats["top1_err"], stats["min_top1_err"]) == (100.0, 0.0)


def test_loss_that_is_not_finite_stops_with_its_place(fresh_cfg):
    meter, labels = meters.TrainMeter(10, CPU), torch.arange(4)
    for loss in (1.0, float("nan"), 1.0):
        meter.add(torch.tensor(loss), torch.zeros(4, 6), labels, lr=0.25)
    with pytest.raises(UserError, match="nan in epoch 3, iteration 6, at learning rate 0.25"):
        meter.flush(2, 6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_logits_give_plain_numbers(fresh_cfg, dtype):
    meter, labels = meters.TrainMeter(1, CPU), torch.arange(4)
    meter.add(torch.tensor(1.5, dtype=dtype), torch.eye(4).to(dtype), labels, lr=0.1)
    meter.flush(0, 0)
    assert all(type(v) in (int, float, str) for v in meter.get_iter_stats(0, 0).values())
    assert meter.get_epoch_stats(0)["loss"] == 1.5


def test_adding_a_step_brings_nothing_to_the_host(fresh_cfg):
    class NoSync(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert "_local_scalar_dense" not in str(func) and "item" not in str(func), func
            return func(*args, **(kwargs or {}))

    meter, labels = meters.TrainMeter(5, CPU), torch.arange(4)
    logits, loss = torch.randn(4, 6), torch.tensor(1.0)
    with NoSync():
        meter.add(loss, logits, labels, lr=0.1)


@pytest.mark.parametrize("seconds, text", [(0, "00,00:00:00"), (59.6, "00,00:01:00"), (90061, "01,01:01:01")])
def test_time_string(seconds, text):
    assert meters.time_string(seconds) == text
