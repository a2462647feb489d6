"""The planner's memory is what torch really uses, its speeds have the shape of published ones, its advice works."""

import itertools
import json
import subprocess
import sys

import pytest
import torch

from pycls.core import builders, config, ema, hardware, memory, net, parallel, plan_report, planner, roofline, trace
from pycls.core import optimizer as optim
from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.precision import Precision

CPU = torch.device("cpu")
SMALL = {"MODEL.TYPE": "vit", "MODEL.NUM_CLASSES": 10, "VIT.PATCH_SIZE": 8, "VIT.HIDDEN_DIM": 64, "VIT.MLP_DIM": 128,
         "VIT.NUM_HEADS": 2, "VIT.NUM_LAYERS": 4, "TRAIN.IM_SIZE": 32, "OPTIM.OPTIMIZER": "adamw"}  # fmt: skip


def load(name, **words):
    config.reset_cfg()
    config.load_cfg(f"configs/{name}.yaml")
    set_words({key.replace("__", "."): value for key, value in words.items()})


def set_words(words):
    cfg.merge_from_list([word for pair in words.items() for word in pair])


def cluster_of(key, network=None, per_node=8):
    gpu = hardware.GPUS[key]
    return roofline.Cluster(key, gpu, per_node, network or gpu.network)


def style_of(mode):
    choice = memory.choice_of_config(1, 2, False)._replace(mode=mode)
    return choice.style


# --------------------------------------------------------------------- memory is true


def measured(mode, batch):
    """A real forward and backward pass of the config's model on the CPU, gradients of weights dropped as they come:
    bytes that autograd's hooks see saved, bytes that torch's memory tracker sees alive when the forward pass has ended,
    and at most; weights and images left out."""
    from torch.distributed._tools.mem_tracker import MemTracker

    precision = Precision(mode, CPU)
    model = precision.cast(builders.build_model())
    parallel.checkpoint_activations(model)
    images = torch.rand(batch, 3, cfg.TRAIN.IM_SIZE, cfg.TRAIN.IM_SIZE)
    labels = net.smooth_one_hot_labels(torch.zeros(batch, dtype=torch.int64))
    fixed, saved, tracker = [*model.parameters(), images, labels], {}, MemTracker()
    known = {tensor.untyped_storage()._cdata for tensor in fixed}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    def alive(kind):
        return sum(tracker.get_tracker_snapshot(kind)[CPU].values()) // 2  # each entry stands in `Total` once more

    tracker.track_external(model, images, labels)
    start = alive("current")
    with tracker:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = builders.build_loss_fun()(precision.forward(model, images), labels)
        end = alive("current") - start
        loss.backward()
    return sum(saved.values()), end, alive("peak") - start


# Every value of every option, most pairs of them.
CASES = [
    ("S16", "fp32", "none", "batch_second", "math"),
    ("S16", "fp32", "selective", "batch_first", "sdpa"),
    ("S16", "amp_bf16", "none", "batch_first", "sdpa"),
    ("S16", "amp_bf16", "selective", "batch_second", "math"),
    ("S16", "amp_bf16", "block", "batch_second", "sdpa"),
    ("B16", "bf16", "block", "batch_first", "math"),
    ("B16", "amp_bf16", "none", "batch_second", "sdpa"),
]


@pytest.mark.filterwarnings("ignore:Expected a tensor", "ignore:Module is None")
@pytest.mark.parametrize(("name", "mode", "checkpoint", "layout", "attention"), CASES)
def test_activations_are_within_a_tenth_of_what_torch_keeps(fresh_cfg, name, mode, checkpoint, layout, attention):
    words = {
        "ACT_CHECKPOINT": checkpoint,
        "VIT__LAYOUT": layout,
        "VIT__ATTENTION": attention,
        "COMPILE__ENABLED": False,
    }
    load(f"vit/ViT-{name}_optimised_224", **words)
    hooked, end, peak = measured(mode, 1)
    found = trace.trace_step(style_of(mode), 1, cuda=False)
    assert found.saved == pytest.approx(end, rel=0.1)
    assert max(found.forward, found.saved + found.working) == pytest.approx(peak, rel=0.1)
    if checkpoint == "none":
        assert found.saved == pytest.approx(hooked, rel=0.1)


def by_hand(mode, batch):
    """What a ViT's blocks keep, counted on paper. Per token of width d and MLP width m, c bytes a number (4 or 2): the
    inputs of both norms in fp32 with a mean and a deviation each; the inputs of the four linears, c (3 d + m); queries,
    keys and values, 3 c d; the GELU's input, c m; of fused attention a log-sum in fp32 per head, of explicit attention
    its weights instead, c per head and token."""
    v, c = cfg.VIT, 4 if mode == "fp32" else 2
    d, m, heads, tokens = v.HIDDEN_DIM, v.MLP_DIM, v.NUM_HEADS, (cfg.TRAIN.IM_SIZE // v.PATCH_SIZE) ** 2
    attention = 4 * heads if v.ATTENTION == "sdpa" else c * heads * tokens
    per_token = 2 * (4 * d + 8) + c * (3 * d + m) + 3 * c * d + c * m + attention
    return batch * tokens * per_token * v.NUM_LAYERS


@pytest.mark.parametrize(("mode", "attention"), list(itertools.product(("fp32", "amp_bf16", "bf16"), ("sdpa", "math"))))
def test_the_trace_agrees_with_the_count_on_paper(fresh_cfg, mode, attention):
    load("vit/ViT-B16_optimised_224", VIT__ATTENTION=attention, COMPILE__ENABLED=False)
    found = trace.trace_step(style_of(mode), 16, cuda=False)
    assert found.saved - found.cast == pytest.approx(by_hand(mode, 16), rel=0.02)


def test_explicit_attention_computes_softmax_in_fp32_under_autocast_on_a_gpu(fresh_cfg):
    load("vit/ViT-B16_optimised_224", VIT__ATTENTION="math")
    weights = 12 * 16 * 12 * 196 * 196  # blocks, images, heads, tokens, tokens
    on_cpu, on_gpu = (trace.trace_step(style_of("amp_bf16"), 16, cuda).saved for cuda in (False, True))
    # The fp32 result beside the 16-bit one, which is all that the CPU keeps.
    assert on_gpu - on_cpu == pytest.approx(4 * weights, rel=0.01)


@pytest.mark.parametrize("checkpoint", ["none", "selective", "block"])
def test_two_blocks_tell_what_four_do(fresh_cfg, checkpoint):
    set_words({**SMALL, "ACT_CHECKPOINT": checkpoint})
    style = style_of("amp_bf16")
    short, whole = trace.trace_step(style, 8), trace._trace(style, 8, True)
    assert short.ops == whole.ops and short[1:] == whole[1:]


@pytest.mark.parametrize(
    ("mode", "name"), [("fp32", "adamw"), ("fp32", "sgd"), ("amp_bf16", "adam"), ("bf16", "adamw")]
)
def test_what_stands_in_memory_is_exact(fresh_cfg, mode, name):
    set_words({**SMALL, "PRECISION.MODE": mode, "OPTIM.OPTIMIZER": name, "OPTIM.EMA_UPDATE_PERIOD": 1})
    precision = Precision(mode, CPU)
    model = builders.build_model()
    average = ema.copy_for_ema(model)
    model = precision.cast(model)
    optimizer = optim.construct_optimizer(model)
    precision.attach(optimizer)
    precision.backward(precision.forward(model, torch.rand(2, 3, 32, 32)).sum())
    gradients = [p.grad for p in model.parameters()]
    precision.step(optimizer, lambda parameters: None)
    state = [
        t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor) and t.dim()
    ]

    def size(tensors):
        return sum(t.numel() * t.element_size() for t in tensors)

    choice = memory.choice_of_config(1, 2, False)
    weights = memory.Model().weights_of(choice)
    standing = memory._standing(choice, weights)
    assert standing["weights"] == size(model.parameters()) + size(model.buffers())
    assert standing["optimizer state"] == size(state)
    assert standing["EMA"] == size(average.parameters()) + size(average.buffers())
    assert standing["master copies"] == size(precision.master.copies) + size(precision.master.gradients)
    assert memory._gradients(choice, weights)[0] == size(gradients)


SHARDED = """
import sys, torch, torch.distributed as D
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from pycls.core import builders, config, distributed, memory, net, parallel, optimizer
from pycls.core.precision import Precision
D.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
distributed.get_world_size = lambda: 8
for reshard in (False, True):
    config.reset_cfg()
    config.load_cfg("configs/vit/ViT-S16_optimised_224.yaml")
    config.cfg.merge_from_list(["FSDP.ENABLED", True, "FSDP.RESHARD_AFTER_FW", reshard, "OPTIM.EMA_UPDATE_PERIOD", 0,
                                "VIT.NUM_LAYERS", 5])
    precision = Precision("amp_bf16", torch.device("cpu"))
    plan = parallel.Sharded(builders.build_model(), None, precision)
    images, labels = torch.rand(2, 3, 224, 224), net.smooth_one_hot_labels(torch.zeros(2, dtype=torch.int64))
    tracker = FSDPMemTracker(plan.raw, optimizer.construct_optimizer(plan.raw))
    tracker.track_inputs((images, labels))
    with tracker:
        builders.build_loss_fun()(precision.forward(plan.model, images), labels).backward()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    choice = memory.choice_of_config(8, 2, False)
    parts = memory.Model().memory(choice)[1]
    local = sum(p.to_local().numel() for p in plan.raw.parameters())
    ours = sum(v for name, v in parts.items() if name not in ("context", "optimizer state"))
    print(peak, ours, 4 * local, parts["weights"])
"""


def test_sharded_memory_is_within_a_tenth_of_what_torch_tracks():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SHARDED], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(rows) == 2
    for peak, ours, local, weights in rows:
        assert weights == local and ours == pytest.approx(peak, rel=0.1)


def test_a_convolutional_net_is_traced_as_it_is(fresh_cfg):
    load("dds_baselines/regnetx/RegNetX-200MF_dds_8gpu")
    saved = []
    model = builders.build_model()
    known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor):
        saved.append(tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(torch.rand(2, 3, 224, 224))
    images = 2 * 3 * 224 * 224 * 4  # kept by the first convolution; counted apart
    kept = sum({s._cdata: s.nbytes() for s in saved if s._cdata not in known}.values()) - images
    assert logits.shape == (2, 1000)
    assert trace.trace_step(style_of("fp32"), 2, cuda=False).saved == pytest.approx(kept, rel=0.1)


def test_in_place_activations_and_selective_checkpointing_are_refused_in_one_line(fresh_cfg):
    load("dds_baselines/regnety/RegNetY-200MF_dds_8gpu", ACT_CHECKPOINT="selective")
    with pytest.raises(UserError, match="MODEL.ACTIVATION_INPLACE False"):
        trace.trace_step(style_of("fp32")._replace(checkpoint="selective"), 2)


# ---------------------------------------------------------------- Meta's published shape

# What Meta ran: PyCls's explicit attention, nothing compiled, multi-tensor optimizer, 560 images on 8 A100.
META = {"PRECISION__MODE": "amp_fp16", "COMPILE__ENABLED": False, "OPTIM__FUSED": False, "OPTIM__MTA": True,
        "VIT__ATTENTION": "math"}  # fmt: skip


def speeds(name, batch, counts, words):
    load(f"vit/ViT-H16_{name}_224", **words)
    cluster, model = cluster_of("a100-40"), memory.Model()
    rows = [planner.figures(memory.choice_of_config(n, batch, True), model, cluster, 1_281_167, 0) for n in counts]
    assert all(row["memory"]["fits"] for row in rows)
    return rows


def test_metas_vit_h_is_reproduced(fresh_cfg):
    rows = speeds("optimised", 70, (8, 16, 32, 64), META)
    assert rows[0]["images_per_second_per_gpu"] == pytest.approx(103, rel=0.1)
    assert rows[0]["mfu"] == pytest.approx(0.25, abs=0.03)
    per_gpu = [row["images_per_second_per_gpu"] for row in rows]
    assert per_gpu == sorted(per_gpu, reverse=True) and 0.85 < per_gpu[-1] / per_gpu[0] < 1
    assert rows[0]["hours_per_epoch"] == pytest.approx(0.43, rel=0.1)
    baseline = speeds("baseline", 32, (8, 64), {})
    assert baseline[0]["hours_per_epoch"] == pytest.approx(0.65, rel=0.15)
    assert 1.5 < per_gpu[-1] / baseline[1]["images_per_second_per_gpu"] < 2.2


def test_messages_are_counted_as_the_collectives_send_them(fresh_cfg):
    load("vit/ViT-B16_optimised_224")
    cluster = cluster_of("h100")
    choice = memory.choice_of_config(16, 8, True)
    weights = memory.Model().weights_of(choice)
    (ddp,) = roofline.messages(choice, weights, cluster)
    assert (ddp.kind, ddp.bytes) == ("all-reduce", 2 * 15 / 16 * 4 * weights.count)
    sharded = choice.changed({"FSDP.ENABLED": True, "FSDP.RESHARD_AFTER_FW": True})
    kinds = {m.kind: m.bytes for m in roofline.messages(sharded, weights, cluster)}
    assert kinds == {"all-gather": 15 / 16 * 2 * weights.count, "reduce-scatter": 15 / 16 * 4 * weights.count}
    hybrid = sharded.changed({"FSDP.SHARD_SIZE": 8})
    (reduced,) = (m for m in roofline.messages(hybrid, weights, cluster) if m.kind == "all-reduce")
    assert reduced.bytes == 2 * 1 / 2 * 4 * weights.count / 8


def test_hybrid_shards_need_the_network_less(fresh_cfg):
    load("vit/ViT-H16_optimised_224")
    cluster, model = cluster_of("a100-40", network=12.5), memory.Model()
    choice = memory.choice_of_config(64, 70, True).changed({"FSDP.RESHARD_AFTER_FW": True})
    hybrid = choice.changed({"FSDP.SHARD_SIZE": 8})
    assert roofline.step_time(hybrid, model, cluster).exposed < roofline.step_time(choice, model, cluster).exposed
    assert sum(model.memory(hybrid)[1].values()) > sum(model.memory(choice)[1].values())


# ------------------------------------------------------------------------------ advice

TOO_LARGE = {
    "baseline on 16 GB": ("vit/ViT-H16_baseline_224", "v100-16", 8, 32, {}),
    "one GPU": ("vit/ViT-H16_baseline_224", "a100-40", 1, 96, {}),
    "large batch": ("vit/ViT-H16_optimised_224", "a100-40", 8, 512, {}),
    "fp32": ("vit/ViT-L16_optimised_224", "v100-16", 8, 64, {"PRECISION__MODE": "fp32"}),
}


@pytest.mark.parametrize("case", TOO_LARGE)
def test_what_does_not_fit_is_told_a_change_that_then_fits(fresh_cfg, case):
    name, gpu, gpus, batch, words = TOO_LARGE[case]
    load(name, **words)
    cluster = cluster_of(gpu)
    choice = memory.choice_of_config(gpus, batch, True)
    assert not planner.figures(choice, memory.Model(), cluster, 1, 0)["memory"]["fits"]
    advice = planner.fitting_change(choice, memory.Model(), cluster)
    set_words({**advice, "TRAIN.BATCH_SIZE": gpus * batch, "NUM_GPUS": gpus})
    config.validate_cfg()
    again = memory.choice_of_config(gpus, batch, True)
    assert planner.figures(again, memory.Model(), cluster, 1, 0)["memory"]["fits"]


def test_nothing_is_advised_where_nothing_helps(fresh_cfg):
    load("vit/ViT-H16_baseline_224")
    tiny = cluster_of("h100")
    tiny = tiny._replace(gpu=tiny.gpu._replace(memory=2))
    assert planner.fitting_change(memory.choice_of_config(1, 1, True), memory.Model(), tiny) is None


# ------------------------------------------------------------------------- calibration


def timing(step, optimizer, device="NVIDIA H100 80GB HBM3", **more):
    return {"device": device, "config": cfg.dump(), "processes": cfg.NUM_GPUS, "precision": "amp_bf16",
            "train_batch_per_process": 32, "train_step_seconds_slowest_process": step,
            "optimizer_seconds": optimizer, **more}  # fmt: skip


@pytest.mark.parametrize("gpus", [1, 8])
def test_a_calibrated_prediction_of_the_timed_step_is_the_timing(fresh_cfg, tmp_path, gpus):
    load("vit/ViT-S16_optimised_224", NUM_GPUS=gpus)
    path = tmp_path / "timing.json"
    path.write_text(json.dumps(timing(0.5, 0.02)))
    cluster, compared = planner.calibrate(str(path), cluster_of("h100"))
    choice, model = memory.choice_of_config(gpus, 32, True), memory.Model()
    step = roofline.step_time(choice, model, cluster)
    assert step.seconds == pytest.approx(0.5) and step.optimizer == pytest.approx(0.02)
    assert compared["predicted_step_seconds"] != pytest.approx(0.5, rel=0.5)
    # Twice the images: the same machine, so about twice the time, but for the optimizer.
    double = roofline.step_time(choice._replace(batch=64), model, cluster).seconds
    assert double == pytest.approx(0.5 + 0.48, rel=0.1)


def test_calibration_leaves_the_config_alone_and_refuses_what_does_not_match(fresh_cfg, tmp_path):
    load("vit/ViT-S16_optimised_224")
    path = tmp_path / "timing.json"
    path.write_text(json.dumps(timing(0.5, 0.02)))
    load("vit/ViT-B16_optimised_224")
    before = cfg.dump()
    planner.calibrate(str(path), cluster_of("h100"))
    assert cfg.dump() == before
    with pytest.raises(UserError, match="was measured on NVIDIA H100 80GB HBM3, not on --gpu b200"):
        planner.calibrate(str(path), cluster_of("b200"))
    path.write_text(json.dumps({"device": "NVIDIA H100"}))
    with pytest.raises(UserError, match="has no config"):
        planner.calibrate(str(path), cluster_of("h100"))


# ---------------------------------------------------------------------------- the report


def test_strong_scaling_keeps_the_global_batch(fresh_cfg):
    load("vit/ViT-B16_optimised_224")
    choice = memory.choice_of_config(8, 8, True)
    rows = plan_report.scaling(choice, memory.Model(), cluster_of("h100"), weak=False)
    assert [(row["gpus"], row["batch_per_gpu"]) for row in rows] == [(2**i, 64 // 2**i) for i in range(7)]


def test_a_mode_that_the_device_lacks_is_named(fresh_cfg):
    load("vit/ViT-B16_optimised_224")
    with pytest.raises(UserError, match="amp_bf16 is emulated on v100-32, and slow; try amp_fp16"):
        plan_report.report(memory.choice_of_config(8, 8, True), cluster_of("v100-32"), 1, 0)


def test_a_gpu_is_planned_with_its_own_choice_of_attention(fresh_cfg):
    load("vit/ViT-S16_optimised_224")
    auto, sdpa = (trace.trace_step(style_of("amp_bf16")._replace(attention=a), 2, cuda=True) for a in ("auto", "sdpa"))
    assert auto.saved == sdpa.saved and any(op.kind == "attention" for op in auto.ops)
