"""Soft labels, mixing, precise batch norm, complexity of plug-ins."""

import pytest
import torch
from torch import nn

from pycls.core import net


def test_soft_labels_follow_the_formula(fresh_cfg):
    fresh_cfg.merge_from_list(["MODEL.NUM_CLASSES", 4, "TRAIN.LABEL_SMOOTHING", 0.2])
    soft = net.smooth_one_hot_labels(torch.tensor([2, 0]))
    assert torch.allclose(soft, torch.tensor([[0.05, 0.05, 0.85, 0.05], [0.85, 0.05, 0.05, 0.05]]))


def test_loss_is_cross_entropy_of_hard_labels(fresh_cfg):
    fresh_cfg.MODEL.NUM_CLASSES = 5
    logits, labels = torch.randn(7, 5), torch.arange(7) % 5
    loss = net.SoftCrossEntropyLoss()(logits, net.smooth_one_hot_labels(labels))
    assert torch.allclose(loss, nn.functional.cross_entropy(logits, labels))


MIXES = {"mixup": (0.8, 0.0), "cutmix": (0.0, 1.0), "both": (0.8, 1.0)}


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
@pytest.mark.parametrize("mixup, cutmix", MIXES.values(), ids=MIXES)
def test_mixing_keeps_labels_a_distribution(fresh_cfg, batch, mixup, cutmix):
    fresh_cfg.merge_from_list(["TRAIN.MIXUP_ALPHA", mixup, "TRAIN.CUTMIX_ALPHA", cutmix, "MODEL.NUM_CLASSES", 3])
    for iteration in range(10):
        inputs = torch.rand(batch, 3, 8, 6)
        mix = net.draw_mix(0, iteration, 8, 6)
        mixed, soft = net.apply_mix(mix, inputs, net.smooth_one_hot_labels(torch.arange(batch) % 3))
        assert mixed.shape == inputs.shape
        assert torch.allclose(soft.sum(dim=1), torch.ones(batch))
        if batch == 1:
            assert torch.equal(mixed, inputs)


def test_cutmix_share_is_the_true_area(fresh_cfg):
    fresh_cfg.TRAIN.CUTMIX_ALPHA = 1.0
    for iteration in range(20):
        mix = net.draw_mix(1, iteration, 10, 12)
        zeros_and_ones = torch.stack([torch.zeros(1, 10, 12), torch.ones(1, 10, 12)])
        mixed, soft = net.apply_mix(mix, zeros_and_ones, torch.eye(2))
        assert mixed[0].mean().item() == pytest.approx(1 - mix.share, abs=1e-6)
        assert soft[0, 0].item() == pytest.approx(mix.share, abs=1e-6)


def test_both_kinds_of_mixing_are_drawn_about_equally(fresh_cfg):
    fresh_cfg.merge_from_list(["TRAIN.MIXUP_ALPHA", 0.8, "TRAIN.CUTMIX_ALPHA", 1.0])
    cut = sum(net.draw_mix(0, i, 8, 8).box is not None for i in range(400))
    assert 150 < cut < 250


def test_a_batch_is_mixed_alike_however_it_is_split(fresh_cfg):
    fresh_cfg.TRAIN.MIXUP_ALPHA = 0.8
    inputs, soft, mix = torch.rand(8, 3, 4, 4), torch.eye(8), net.draw_mix(3, 5, 4, 4)
    whole, _ = net.apply_mix(mix, inputs, soft)
    halves = [net.apply_mix(mix, x, y)[0] for x, y in zip(inputs.chunk(2), soft.chunk(2))]
    assert torch.equal(whole, torch.cat(halves))


def test_precise_statistics_are_means_over_batches(fresh_cfg):
    fresh_cfg.merge_from_list(["TRAIN.BATCH_SIZE", 4, "BN.NUM_SAMPLES_PRECISE", 12])
    model = nn.Sequential(nn.BatchNorm2d(3)).eval()
    batches = [(torch.randn(4, 3, 5, 5) + i, None) for i in range(4)]
    net.compute_precise_bn_stats(model, batches)
    used = [inputs for inputs, _ in batches[:3]]
    mean = torch.stack([x.mean(dim=(0, 2, 3)) for x in used]).mean(dim=0)
    var = torch.stack([x.var(dim=(0, 2, 3)) for x in used]).mean(dim=0)
    assert torch.allclose(model[0].running_mean, mean, atol=1e-5)
    assert torch.allclose(model[0].running_var, var, atol=1e-5)
    assert model[0].momentum == 0.1 and not model.training


def test_precise_statistics_leave_a_net_without_batch_norm_alone(fresh_cfg):
    def never():
        raise AssertionError("the loader was touched")
        yield

    net.compute_precise_bn_stats(nn.Linear(2, 2), never())


def test_a_plug_in_without_complexity_is_counted_by_tracing(fresh_cfg):
    fresh_cfg.TRAIN.IM_SIZE = 8

    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.Linear(4 * 64, 2, bias=False)

        def forward(self, x):
            return self.head(self.conv(x).flatten(1))

    assert net.complexity(Tiny) == {"flops": 27 * 4 * 64 + 512, "params": 108 + 512, "acts": 4 * 64 + 2}
