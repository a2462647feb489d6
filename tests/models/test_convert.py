"""Weights go to other libraries and back: equal logits where the library is at hand, equal bytes on the way back."""

import re

import pytest
import torch
from torch import nn

from pycls.core import builders, config
from pycls.core.checkpoint import load_checkpoint, load_weights
from pycls.core.errors import UserError
from pycls.models import convert

VIT = ["MODEL.TYPE", "vit", "TRAIN.IM_SIZE", 32, "VIT.PATCH_SIZE", 8, "VIT.HIDDEN_DIM", 32, "VIT.MLP_DIM", 48,
       "VIT.NUM_HEADS", 4, "VIT.NUM_LAYERS", 2, "MODEL.NUM_CLASSES", 7, "LN.EPS", 1e-12]  # fmt: skip
REGNET = ["MODEL.TYPE", "regnet", "REGNET.DEPTH", 5, "REGNET.W0", 16, "REGNET.WA", 8.0, "REGNET.WM", 2.0,
          "REGNET.GROUP_W", 8, "REGNET.STEM_W", 8, "MODEL.NUM_CLASSES", 7, "TRAIN.IM_SIZE", 64]  # fmt: skip
RESNET = ["MODEL.TYPE", "resnet", "MODEL.DEPTH", 50, "RESNET.TRANS_FUN", "bottleneck_transform",
          "RESNET.STRIDE_1X1", False, "MODEL.NUM_CLASSES", 7, "TRAIN.IM_SIZE", 64]  # fmt: skip
MODELS = {"vit": VIT, "regnetx": REGNET, "regnety": [*REGNET, "REGNET.SE_ON", True], "resnet": RESNET}


def build(family):
    config.reset_cfg()
    config.cfg.merge_from_list(MODELS[family])
    torch.manual_seed(0)
    model = builders.build_model().eval()
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            noise = torch.randn_like(value) * 0.1
            value.copy_(noise.abs() + 0.5 if "var" in name else value + noise)
    return model


@pytest.mark.parametrize("library", convert.LIBRARIES)
@pytest.mark.parametrize("family", convert.FAMILIES)
@pytest.mark.parametrize("turn", [True, False])
def test_there_and_back_gives_identical_bytes(fresh_cfg, family, library, turn):
    state = build(family).state_dict()
    theirs = convert.to_library(state, family, library, turn)
    back = convert.from_library(theirs, family, library, turn)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], value) and back[name].dtype == value.dtype for name, value in state.items())
    assert len(set(theirs) & set(state)) < len(state)


@pytest.mark.parametrize("library", convert.LIBRARIES)
@pytest.mark.parametrize("family", convert.FAMILIES)
def test_names_of_a_library_are_recognised(fresh_cfg, family, library):
    names = convert.to_library(build(family).state_dict(), family, library)
    there = convert.recognise(names)
    convert.from_library(names, there[1], there[0])
    assert (there[0], there[1][:6]) == (library, family[:6]) or family == "resnet"


@pytest.mark.parametrize("family", convert.FAMILIES)
def test_our_names_are_taken_for_no_librarys(fresh_cfg, family):
    assert convert.recognise(build(family).state_dict()) is None


@pytest.mark.parametrize("load", [load_weights, load_checkpoint])
def test_weights_under_another_librarys_names_are_refused_with_how_to_convert_them(fresh_cfg, tmp_path, load):
    model, path = build("vit"), str(tmp_path / "tv.pth")
    torch.save(convert.to_library(model.state_dict(), "vit", "torchvision"), path)
    with pytest.raises(UserError, match=r"convert.py .*tv.pth ours.pyth --from torchvision --family vit"):
        load(path, model)


def turned(images):
    return images.flip(1)


def of_transformers(family, model):
    transformers = pytest.importorskip("transformers")
    if family == "vit":
        c = transformers.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
                                   image_size=32,
                                   patch_size=8, num_labels=7, layer_norm_eps=1e-12)  # fmt: skip
        return transformers.ViTForImageClassification(c)
    widths = [m[-1].f.c.out_channels for name, m in model.named_children() if re.fullmatch(r"s\d", name)]
    depths = [len(m) for name, m in model.named_children() if re.fullmatch(r"s\d", name)]
    if family == "resnet":
        c = transformers.ResNetConfig(embedding_size=64, hidden_sizes=widths, depths=depths, num_labels=7)
        return transformers.ResNetForImageClassification(c)
    c = transformers.RegNetConfig(embedding_size=8, hidden_sizes=widths, depths=depths, groups_width=8, num_labels=7,
                                  layer_type=family[-1])  # fmt: skip
    return transformers.RegNetForImageClassification(c)


@pytest.mark.parametrize("family", convert.FAMILIES)
def test_transformers_computes_the_same_logits(fresh_cfg, family):
    model = build(family)
    theirs = of_transformers(family, model).eval().double()
    model = model.double()
    theirs.load_state_dict(convert.to_library(model.state_dict(), family, "transformers"))
    images = torch.randn(2, 3, fresh_cfg.TRAIN.IM_SIZE, fresh_cfg.TRAIN.IM_SIZE).double()
    with torch.no_grad():
        assert torch.allclose(theirs(turned(images)).logits, model(images), atol=1e-5, rtol=1e-5)


class TimmViT(nn.Module):
    """A ViT in timm's layout and names, written down from its documentation: the reference where timm is absent."""

    def __init__(self, width=32, depth=2, heads=4, hidden=48, classes=7, tokens=17):
        super().__init__()
        self.heads = heads
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, width))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, 8, 8)})
        norm = lambda: nn.LayerNorm(width, eps=1e-12)  # noqa: E731
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "norm1": norm(), "norm2": norm(),
                "attn": nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)}),
                "mlp": nn.ModuleDict({"fc1": nn.Linear(width, hidden), "fc2": nn.Linear(hidden, width)}),
            })
            for _ in range(depth)
        )  # fmt: skip
        self.norm, self.head = norm(), nn.Linear(width, classes)

    def forward(self, images):
        x = self.patch_embed["proj"](images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        for block in self.blocks:
            qkv = block["attn"]["qkv"](block["norm1"](x))
            q, k, v = qkv.reshape(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            weights = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1)
            x = x + block["attn"]["proj"]((weights @ v).transpose(1, 2).flatten(2))
            x = x + block["mlp"]["fc2"](nn.functional.gelu(block["mlp"]["fc1"](block["norm2"](x))))
        return self.head(self.norm(x)[:, 0])


def test_timms_vit_computes_the_same_logits(fresh_cfg):
    model, theirs, images = build("vit"), TimmViT(), torch.randn(2, 3, 32, 32)
    theirs.load_state_dict(convert.to_library(model.state_dict(), "vit", "timm"))
    with torch.no_grad():
        assert torch.allclose(theirs(turned(images)), model(images), atol=1e-5)


GOLDEN = {
    ("vit", "torchvision"): ["class_token", "encoder.pos_embedding", "conv_proj.weight",
                             "encoder.layers.encoder_layer_1.self_attention.in_proj_weight",
                             "encoder.layers.encoder_layer_0.mlp.3.bias", "encoder.ln.weight", "heads.head.bias"],
    ("regnety", "timm"): ["stem.conv.weight", "s1.b1.conv2.bn.running_mean", "s1.b1.se.fc2.bias",
                          "s2.b1.downsample.conv.weight", "head.fc.weight"],
    ("regnety", "torchvision"): ["stem.0.weight", "trunk_output.block1.block1-0.f.b.1.running_var",
                                 "trunk_output.block2.block2-1.f.se.fc1.weight",
                                 "trunk_output.block1.block1-0.proj.0.weight",
                                 "fc.bias"],
    ("resnet", "torchvision"): ["conv1.weight", "bn1.bias", "layer1.0.downsample.1.running_mean",
                                "layer3.5.conv2.weight", "layer4.2.bn3.weight", "fc.weight"],
}  # fmt: skip


@pytest.mark.parametrize("family, library", GOLDEN)
def test_documented_names_are_there(fresh_cfg, family, library):
    names = convert.to_library(build(family).state_dict(), family, library)
    assert [name for name in GOLDEN[family, library] if name not in names] == []


def test_names_of_another_kind_are_refused(fresh_cfg):
    with pytest.raises(UserError, match=r"do not belong to that kind of model: class_token"):
        convert.to_library(build("vit").state_dict(), "resnet", "timm")
    with pytest.raises(UserError, match="did you mean timm"):
        convert.to_library({}, "vit", "tim")


@pytest.fixture
def checkpoint(tmp_path):
    """A whole checkpoint of a small ViT as training writes it: (path, model)."""
    model = build("vit")
    config.cfg.merge_from_list(["TRAIN.DATASET", "imagefolder", "TEST.IM_SIZE", 36])
    path = tmp_path / "model.pyth"
    state = {"epoch": 1, "test_err": 10.0, "ema_err": 20.0, "model_state": model.state_dict(), "cfg": config.cfg.dump(),
             "class_names": list("abcdefg")}  # fmt: skip
    torch.save(state, path)
    config.reset_cfg()
    return path, model


def test_the_tool_converts_and_safetensors_come_back(run_tool, checkpoint, tmp_path):
    pytest.importorskip("safetensors")
    path, model = checkpoint
    there = run_tool("convert.py", path, tmp_path / "timm.safetensors", "--to", "timm")
    assert there.returncode == 0, there.stderr
    back = run_tool(
        "convert.py", tmp_path / "timm.safetensors", tmp_path / "back.pyth", "--from", "timm", "--family", "vit"
    )
    assert back.returncode == 0, back.stderr
    state = torch.load(tmp_path / "back.pyth", weights_only=True)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("pixels", [False, True])
def test_onnx_computes_the_same_for_any_batch(run_tool, checkpoint, tmp_path, pixels):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    path, model = checkpoint
    done = run_tool("convert.py", path, tmp_path / "m.onnx", *(["--pixels"] if pixels else []))
    assert done.returncode == 0, done.stderr
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    mean, std = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    for batch in (1, 4):
        rgb = torch.rand(batch, 3, 32, 32) * 255
        ready = ((rgb / 255 - mean) / std).flip(1)
        logits = session.run(None, {"images": (rgb if pixels else ready).numpy()})[0]
        with torch.no_grad():
            assert torch.allclose(torch.from_numpy(logits), model(ready), atol=1e-4)
    facts = (tmp_path / "m.json").read_text()
    assert '"order": "bgr"' in facts and '"side": 32' in facts and "class_names" in facts


PLUGIN = """
import torch
from pycls.core.builders import register_model
from pycls.core.config import cfg

class Mean(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3, cfg.MODEL.NUM_CLASSES)

    def forward(self, x):
        return self.fc(x.mean((2, 3)))

register_model("mean_colour", Mean)
"""


def test_a_plug_ins_model_goes_to_onnx(run_tool, tmp_path):
    pytest.importorskip("onnx")
    (tmp_path / "mean.py").write_text(PLUGIN)
    weights = {"fc.weight": torch.zeros(10, 3), "fc.bias": torch.zeros(10)}
    torch.save({"model_state": weights, "cfg": "MODEL: {TYPE: mean_colour}"}, tmp_path / "m.pyth")
    done = run_tool("convert.py", tmp_path / "m.pyth", tmp_path / "m.onnx", "--plugin", tmp_path / "mean.py")
    assert done.returncode == 0 and (tmp_path / "m.onnx").exists(), done.stderr


@pytest.mark.parametrize("spelling", ["model.pyth", "./model.pyth", "link.pyth"])
def test_a_checkpoint_is_never_written_over_by_its_weights(run_tool, checkpoint, tmp_path, spelling):
    path, _ = checkpoint
    (tmp_path / "link.pyth").symlink_to(path)
    before = path.read_bytes()
    done = run_tool("convert.py", path, f"{tmp_path}/{spelling}")
    assert done.returncode == 2 and "is the very file" in done.stderr and done.stderr.count("\n") == 1
    assert path.read_bytes() == before and (tmp_path / "link.pyth").is_symlink()


MISTAKES = {
    "missing": (["{tmp}/none.pyth", "{tmp}/x.pyth", "--to", "timm"], "no such checkpoint"),
    "nothing to do": (["{path}", "{tmp}/x.pyth", "--from", "timm", "--to", "timm"], "--from and --to"),
    "library": (["{path}", "{tmp}/x.pyth", "--to", "keras"], "--to"),
    "family unknown": (["{tmp}/bare.pyth", "{tmp}/x.pyth", "--to", "timm"], "--family"),
    "onnx of bare weights": (["{tmp}/bare.pyth", "{tmp}/x.onnx"], "--cfg"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_the_tool_are_one_line(run_tool, checkpoint, tmp_path, name):
    torch.save(checkpoint[1].state_dict(), tmp_path / "bare.pyth")
    words, message = MISTAKES[name]
    done = run_tool("convert.py", *[word.format(tmp=tmp_path, path=checkpoint[0]) for word in words])
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
