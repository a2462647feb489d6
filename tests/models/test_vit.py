"""The ViT: every fast path equals the plain one, options do what they say, sizes that don't fit are refused."""

import math

import pytest
import torch

from pycls.core import config, net
from pycls.core.errors import UserError
from pycls.models import attention as attentions
from pycls.models.vit import ViT, resize_pos_embedding, sincos_embedding

SMALL = ["TRAIN.IM_SIZE", 32, "VIT.PATCH_SIZE", 8, "VIT.HIDDEN_DIM", 32, "VIT.MLP_DIM", 48, "VIT.NUM_HEADS", 4,
         "VIT.NUM_LAYERS", 2]  # fmt: skip
CONV = ["VIT.STEM_TYPE", "conv", "VIT.C_STEM_KERNELS", [3, 3, 1], "VIT.C_STEM_STRIDES", [4, 2, 1],
        "VIT.C_STEM_DIMS", [8, 16, 32]]  # fmt: skip


def build(*words):
    config.reset_cfg()
    config.cfg.merge_from_list([*SMALL, *words])
    torch.manual_seed(0)
    return ViT()


def filled(model):
    torch.manual_seed(1)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return model.double().eval()


STEMS = {"patchify": [], "conv": CONV}


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("classifier", ["token", "pooled"])
@pytest.mark.parametrize("registers", [0, 3])
def test_layouts_and_attentions_agree(fresh_cfg, stem, classifier, registers):
    words = [*STEMS[stem], "VIT.CLASSIFIER_TYPE", classifier, "VIT.REGISTERS", registers]
    images, state, results = torch.randn(3, 3, 32, 32).double(), None, []
    for layout in ("batch_second", "batch_first"):
        for attention in attentions.KERNELS:
            model = filled(build(*words, "VIT.LAYOUT", layout, "VIT.ATTENTION", attention))
            state = state or model.state_dict()
            model.load_state_dict(state)
            results.append(model(images))
    for other in results[1:]:
        assert torch.allclose(results[0], other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("classifier", ["token", "pooled"])
@pytest.mark.parametrize("layout", ["batch_second", "batch_first"])
def test_tokens_are_contiguous_between_blocks(fresh_cfg, stem, classifier, layout):
    # Tokens laid out otherwise give the right numbers too, but every norm then copies them.
    model, seen = build(*STEMS[stem], "VIT.CLASSIFIER_TYPE", classifier, "VIT.LAYOUT", layout), []
    for block in model.repeated_blocks():
        block.register_forward_hook(lambda module, inputs, output: seen.extend([inputs[0], output]))
    model(torch.randn(3, 3, 32, 32, dtype=next(model.parameters()).dtype))
    assert seen and all(tokens.is_contiguous() for tokens in seen)


def test_the_attention_formula_stays_finite_in_fp16(fresh_cfg):
    q = torch.full((1, 1, 3, 64), 40.0, dtype=torch.float16)
    assert attentions.formula(q, q, q).isfinite().all()


def test_unfused_attention_has_the_gradients_of_the_formula():
    q, k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    torch.autograd.gradcheck(attentions.unfused, (q, k, v))
    # As the model hands them over: views into one tensor whose channels are apart.
    packed = torch.randn(5, 2, 3, 3, 4, dtype=torch.float64, requires_grad=True)
    gradients = []
    for kernel in (attentions.unfused, attentions.formula):
        out = kernel(*(t.permute(1, 2, 0, 3) for t in packed.unbind(2)))
        gradients.append(torch.autograd.grad(out.permute(2, 0, 1, 3).sin().sum(), packed)[0])
    assert torch.allclose(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_unfused_attention_is_as_exact_in_bf16_as_the_fused_kernel(spread):
    # With logits in bf16, as the plain formula has them, the wider spread costs several times the error.
    torch.manual_seed(0)
    q, k, v = (spread * torch.randn(2, 4, 49, 64).bfloat16() for _ in range(3))
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    errors = {}
    for name in ("sdpa", "unfused", "math"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attentions.KERNELS[name](q, k, v)
        assert out.dtype is torch.bfloat16
        errors[name] = float((out - exact).norm() / exact.norm())
    assert errors["unfused"] < min(0.004, 1.5 * errors["sdpa"]) and errors["unfused"] < errors["math"]


def test_unfused_attention_compiles_into_one_graph(fresh_cfg):
    model = build("VIT.ATTENTION", "unfused")
    block, x = model.encoder.block_0, torch.randn(17, 3, 32)
    results = []
    for call in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        block.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            call(x).sin().sum().backward()
        results.append([p.grad.clone() for p in block.parameters()])
    for eager, compiled in zip(*results):
        assert torch.allclose(eager, compiled, rtol=0, atol=1e-2 * float(eager.abs().max()))


def test_auto_attention_takes_products_in_bf16_on_the_cpu_only(monkeypatch):
    monkeypatch.setattr(attentions, "unfused", lambda q, k, v: "unfused")
    q = torch.randn(1, 2, 5, 4)
    assert attentions.automatic(*3 * [q.bfloat16()]) == "unfused"
    assert torch.equal(attentions.automatic(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q))


def test_attention_is_torchs_multi_head_attention(fresh_cfg):
    model = filled(build())
    ours = model.encoder.block_0.self_attention.block
    theirs = torch.nn.MultiheadAttention(32, 4).double()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(17, 3, 32).double()
    assert torch.allclose(ours(x), theirs(x, x, x, need_weights=False)[0], atol=1e-12)


def test_pooled_classifier_is_the_mean_after_the_last_norm(fresh_cfg):
    model, images = filled(build("VIT.CLASSIFIER_TYPE", "pooled")), torch.randn(2, 3, 32, 32).double()
    tokens = model.stem.patchify(images).flatten(2).permute(2, 0, 1) + model.pos_embedding
    expected = model.head(model.encoder(tokens).mean(dim=0))
    assert torch.allclose(model(images), expected, atol=1e-12)


def test_one_kind_of_classifier_names_what_the_other_lacks(fresh_cfg, tmp_path):
    from pycls.core import checkpoint

    torch.save(build("VIT.CLASSIFIER_TYPE", "pooled").state_dict(), tmp_path / "pooled.pth")
    with pytest.raises(UserError, match="class_token is missing in the file"):
        checkpoint.load_checkpoint(str(tmp_path / "pooled.pth"), build())


OPTIONS = {
    "plain": [],
    "conv stem": CONV,
    "registers": ["VIT.REGISTERS", 2],
    "qk norm": ["VIT.QK_NORM", True],
    "layer scale": ["VIT.LAYER_SCALE", 0.1],
    "drop path": ["VIT.DROP_PATH", 0.3],
    "sincos": ["VIT.POS_EMBED", "sincos"],
    "pooled": ["VIT.CLASSIFIER_TYPE", "pooled"],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_parameter_learns_and_is_counted(fresh_cfg, name):
    model = build(*OPTIONS[name]).train()
    torch.nn.init.normal_(model.head.head_fc.weight)
    model(torch.randn(4, 3, 32, 32)).square().sum().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None]
    assert net.complexity(ViT)["params"] == sum(p.numel() for p in model.parameters())


def test_options_that_are_off_add_nothing_to_the_state(fresh_cfg):
    names = set(build().state_dict())
    assert not [n for n in names if any(word in n for word in ("register", "layer_scale", "ln_q", "ln_k"))]


def test_drop_path_drops_whole_samples_in_training_only(fresh_cfg):
    for layout, batch_dim in (("batch_second", 1), ("batch_first", 0)):
        model = build("VIT.DROP_PATH", 0.9, "VIT.LAYOUT", layout)
        block, x = model.encoder.block_1, torch.randn(6, 6, 32)
        changed = (block.train()(x) != x).transpose(0, batch_dim).flatten(1).any(dim=1)
        assert changed.sum() < 6
        assert (block.eval()(x) != x).transpose(0, batch_dim).flatten(1).any(dim=1).all()


def test_initialisation_is_pycls(fresh_cfg):
    model = build("VIT.HIDDEN_DIM", 256, "VIT.MLP_DIM", 512)
    std = {name: p.std().item() for name, p in model.named_parameters() if p.numel() > 1000}
    assert std["stem.patchify.weight"] == pytest.approx(math.sqrt(1 / (3 * 64)), rel=0.05)
    assert std["pos_embedding"] == pytest.approx(0.02, rel=0.1)
    assert std["encoder.block_0.mlp_block.linear_1.weight"] == pytest.approx(math.sqrt(2 / (256 + 512)), rel=0.05)
    assert std["encoder.block_0.self_attention.block.in_proj_weight"] == pytest.approx(
        math.sqrt(2 / (4 * 256)), rel=0.05
    )
    zeros = (
        "class_token",
        "head.head_fc.weight",
        "head.head_fc.bias",
        "encoder.block_0.self_attention.block.in_proj_bias",
    )
    assert all(not dict(model.named_parameters())[name].any() for name in zeros)


BAD_SIZES = {
    "image and patch": (["TRAIN.IM_SIZE", 30], ["TRAIN.IM_SIZE", "30", "VIT.PATCH_SIZE 8", "24 and 32"]),
    "image and strides": ([*CONV, "TRAIN.IM_SIZE", 30], ["30", "VIT.C_STEM_STRIDES 8"]),
    "heads and width": (["VIT.NUM_HEADS", 5], ["5 heads", "VIT.HIDDEN_DIM 32"]),
    "conv lists": ([*CONV, "VIT.C_STEM_DIMS", [8, 32]], ["3, 3 and 2"]),
    "conv width": ([*CONV, "VIT.C_STEM_DIMS", [8, 16, 24]], ["24", "VIT.HIDDEN_DIM 32"]),
    "even kernel": ([*CONV, "VIT.C_STEM_KERNELS", [3, 2, 1]], ["VIT.C_STEM_KERNELS"]),
    "sincos width": (["VIT.POS_EMBED", "sincos", "VIT.HIDDEN_DIM", 30, "VIT.NUM_HEADS", 3], ["30", "divide by 4"]),
}


@pytest.mark.parametrize("name", BAD_SIZES)
def test_sizes_that_do_not_fit_are_refused_with_their_numbers(fresh_cfg, name):
    words, parts = BAD_SIZES[name]
    with pytest.raises(UserError) as error:
        build(*words)
    assert all(part in str(error.value) for part in parts), error.value


def test_images_of_another_size_are_refused_with_both(fresh_cfg):
    with pytest.raises(UserError, match="32 x 32, not 40 x 32"):
        build()(torch.zeros(1, 3, 40, 32))


@pytest.mark.parametrize("special", [0, 1])
def test_position_embedding_is_resized_only_where_needed(special):
    embedding = torch.randn(special + 16, 1, 8)
    assert resize_pos_embedding(embedding, 4, special) is embedding
    larger = resize_pos_embedding(embedding, 8, special)
    assert larger.shape == (special + 64, 1, 8)
    assert torch.equal(larger[:special], embedding[:special])
    flat = resize_pos_embedding(torch.ones(special + 16, 1, 8), 7, special)
    assert torch.allclose(flat, torch.ones_like(flat), atol=1e-5)


def test_fixed_embedding_tells_positions_apart():
    embedding = sincos_embedding(4, 16, class_token=False)[:, 0]
    distances = torch.cdist(embedding, embedding) + 10 * torch.eye(16)
    assert embedding.shape == (16, 16) and distances.min() > 0.1


def test_blocks_compile_without_graph_breaks(fresh_cfg):
    model = build("VIT.QK_NORM", True, "VIT.LAYER_SCALE", 0.1).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    images = torch.randn(2, 3, 32, 32)
    torch.nn.init.normal_(model.head.head_fc.weight)
    assert torch.allclose(compiled(images), model(images), atol=1e-5)
