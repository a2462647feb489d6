"""COMPILE.ENABLED: every repeated block is compiled, all of them by one compilation, and computes what it did."""

import json

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from pycls.core import benchmark, builders, memory, parallel, trainer
from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.precision import Precision
from pycls.core.sharding import can_shard

# More blocks than a compiler starts anew for before it gives up.
LAYERS = 10
VIT = ["MODEL.TYPE", "vit", "VIT.PATCH_SIZE", 8, "VIT.HIDDEN_DIM", 16, "VIT.MLP_DIM", 32, "VIT.NUM_HEADS", 2,
       "VIT.NUM_LAYERS", LAYERS, "TRAIN.IM_SIZE", 16, "MODEL.NUM_CLASSES", 3]  # fmt: skip


CONV_NET = ["MODEL.TYPE", "regnet", "REGNET.DEPTH", 6, "REGNET.W0", 8, "REGNET.WA", 8.0, "REGNET.WM", 2.0,
            "REGNET.GROUP_W", 4, "REGNET.STEM_W", 8, "REGNET.SE_ON", True, "TRAIN.IM_SIZE", 16, "MODEL.NUM_CLASSES", 3,
            "MODEL.ACTIVATION_INPLACE", False]  # fmt: skip


@pytest.fixture
def compiler(fresh_cfg, monkeypatch):
    """Compiles without generating code, and counts from 0."""
    usual = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, **_: usual(module, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


def gradients(mode, *words):
    """Gradients of a training step of the model of the config, by name."""
    cfg.merge_from_list([*VIT, "PRECISION.MODE", mode, *words])
    torch.manual_seed(0)
    precision = Precision(mode, torch.device("cpu"))
    model = parallel.prepare(builders.build_model(), None, precision).model.train()
    nn.init.normal_(model.head.head_fc.weight)
    precision.forward(model, torch.randn(4, 3, 16, 16)).square().sum().backward()
    return {name: p.grad.float() for name, p in model.named_parameters()}


@pytest.mark.parametrize("checkpoint", ["none", "block", "selective"])
@pytest.mark.parametrize("mode", ["fp32", "amp_bf16", "bf16", "amp_fp16", "fp16"])
def test_compiled_blocks_compute_what_they_did(compiler, mode, checkpoint):
    plain = gradients(mode, "ACT_CHECKPOINT", checkpoint)
    assert not compiler["stats"]
    compiled = gradients(mode, "ACT_CHECKPOINT", checkpoint, "COMPILE.ENABLED", True)
    assert compiler["stats"]["unique_graphs"] == 1 and not compiler["graph_break"]
    for name, value in plain.items():
        assert torch.allclose(compiled[name], value, atol=1e-5 if mode == "fp32" else 0.05 * value.abs().max()), name


@pytest.mark.parametrize("checkpoint", ["none", "block", "selective"])
def test_a_net_of_unlike_blocks_is_compiled_as_a_whole(compiler, checkpoint):
    def state_after_steps(*words):
        cfg.merge_from_list([*CONV_NET, "ACT_CHECKPOINT", checkpoint, *words])
        torch.manual_seed(0)
        model = parallel.prepare(builders.build_model(), None, Precision("fp32", torch.device("cpu"))).model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 3, 16, 16)).square().sum().backward()
            optimizer.step()
        return model.state_dict()

    plain = state_after_steps()
    compiled = state_after_steps("COMPILE.ENABLED", True)
    assert compiler["stats"]["unique_graphs"] == 1 and not compiler["graph_break"]
    for name, value in plain.items():
        assert torch.allclose(compiled[name], value, atol=1e-4), name


@pytest.mark.parametrize("checkpoint", ["none", "block", "selective"])
def test_other_drop_rates_are_no_reason_to_compile_again(compiler, checkpoint):
    gradients("fp32", "VIT.DROP_PATH", 0.3, "ACT_CHECKPOINT", checkpoint, "COMPILE.ENABLED", True)
    # The first block drops nothing.
    assert compiler["stats"]["unique_graphs"] == 2 and not compiler["graph_break"]


@pytest.mark.parametrize("checkpoint", ["block", "selective"])
def test_what_is_computed_again_drops_the_same_samples(compiler, checkpoint):
    words = ("VIT.DROP_PATH", 0.5, "COMPILE.ENABLED", True, "ACT_CHECKPOINT")
    kept = gradients("fp32", *words, "none")
    again = gradients("fp32", *words, checkpoint)
    for name, value in kept.items():
        assert torch.allclose(again[name], value, atol=1e-5), name


def test_each_batch_of_a_sweep_is_compiled_as_a_run_with_it_would_be(fresh_cfg, monkeypatch):
    sizes = []

    def backend(graph, inputs):
        sizes.extend(s for value in inputs if isinstance(value, torch.Tensor) for s in value.shape)
        return graph.forward

    usual = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, **_: usual(module, backend=backend))
    monkeypatch.setattr(benchmark, "_would_overflow", lambda rows: len(rows) == 3)
    counters.clear()
    cfg.merge_from_list([*VIT, "COMPILE.ENABLED", True, "PREC_TIME.NUM_ITER", 1, "PREC_TIME.WARMUP_ITER", 0])
    precision = Precision("fp32", torch.device("cpu"))
    rows = benchmark.sweep_batch(benchmark.TrainingStep(trainer.setup_model(precision, with_ema=True), precision))
    assert [row["batch"] for row in rows] == [1, 2, 4] and counters["stats"]["unique_graphs"] == 3
    assert sizes and all(type(size) is int for size in sizes)
    torch._dynamo.reset()


def test_cuda_graphs_and_accumulated_passes_are_refused(fresh_cfg):
    with pytest.raises(UserError, match="ACCUM_ITERS must be 1; use default or max-autotune-no-cudagraphs"):
        gradients("fp32", "COMPILE.ENABLED", True, "COMPILE.MODE", "reduce-overhead", "OPTIM.ACCUM_ITERS", 2)


def test_a_mode_with_cuda_graphs_begins_a_step_with_each_forward_pass(compiler, monkeypatch):
    begun = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    gradients("fp32", "COMPILE.ENABLED", True, "COMPILE.MODE", "reduce-overhead")
    assert len(begun) == 1


def kept_bytes(mode, *words):
    """Bytes that the forward pass of 4 images keeps for the backward pass, weights left out."""
    cfg.merge_from_list([*VIT, "COMPILE.ENABLED", True, "VIT.ATTENTION", "sdpa", "PRECISION.MODE", mode, *words])
    precision = Precision(mode, torch.device("cpu"))
    model = parallel.prepare(builders.build_model(), None, precision).model.train()
    weights, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = precision.forward(model, torch.randn(4, 3, 16, 16))
        total = sum(kept.values())
    assert logits.requires_grad
    return total


def test_recomputation_saves_memory_in_compiled_blocks_too(compiler):
    none, selective, block = (kept_bytes("fp32", "ACT_CHECKPOINT", kind) for kind in ("none", "selective", "block"))
    assert block < 0.7 * selective and selective < 0.9 * none


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_the_planner_knows_what_compiled_blocks_keep(fresh_cfg, monkeypatch, mode):
    usual = nn.Module.compile
    # Divides the graph as the true compiler does.
    backend = "aot_eager_decomp_partition"
    monkeypatch.setattr(nn.Module, "compile", lambda module, **_: usual(module, backend=backend))
    kept = kept_bytes(mode, "VIT.HIDDEN_DIM", 64, "VIT.MLP_DIM", 256, "VIT.PATCH_SIZE", 4)
    torch._dynamo.reset()
    planned = memory.Model().trace_of(memory.choice_of_config(1, 4, cuda=False))
    assert planned.saved - planned.cast == pytest.approx(kept, rel=0.1)


@pytest.mark.skipif(not can_shard("cpu"), reason="sharding on the CPU needs PyTorch 2.7")
def test_sharded_and_recomputed_blocks_compile_without_graph_breaks(run_tool, tmp_path):
    path, plugin = tmp_path / "vit.yaml", tmp_path / "no_code.py"
    # Generating code takes a minute, and shows nothing more.
    plugin.write_text("""
from torch import nn

usual = nn.Module.compile
nn.Module.compile = lambda module, **_: usual(module, backend="aot_eager")
""")
    path.write_text("""
MODEL: {TYPE: vit, NUM_CLASSES: 10}
VIT: {PATCH_SIZE: 16, HIDDEN_DIM: 16, MLP_DIM: 32, NUM_HEADS: 2, NUM_LAYERS: 3, CLASSIFIER_TYPE: pooled}
TRAIN: {IM_SIZE: 32, BATCH_SIZE: 4}
FSDP: {ENABLED: true}
PRECISION: {MODE: amp_bf16}
COMPILE: {ENABLED: true}
ACT_CHECKPOINT: selective
TIME: {TRAIN_ONLY: true}
PREC_TIME: {NUM_ITER: 2, WARMUP_ITER: 0}
DEVICE: cpu
""")
    words = [
        "--mode",
        "time",
        "--plugin",
        plugin,
        "--cfg",
        path,
        "OUT_DIR",
        tmp_path / "out",
        "NUM_GPUS",
        2,
        "OPTIM.ACCUM_ITERS",
        2,
    ]
    done = run_tool("run_net.py", *words)
    assert done.returncode == 0, done.stderr
    timing = json.loads((tmp_path / "out" / "timing.json").read_text())
    assert timing["compiled_graphs"] == 1 and timing["graph_breaks"] == 0
    assert timing["accumulated_passes"] == 2 and "test_seconds" not in timing
