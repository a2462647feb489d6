#!/usr/bin/env python3
"""Convert weights: convert.py IN OUT [--from LIBRARY] [--to LIBRARY] [--family FAMILY], or IN OUT.onnx."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from pycls.core.cli import Parser, guarded, load_plugins
from pycls.core.errors import UserError

_EPILOG = """examples:
  convert.py runs/a/model.pyth a.safetensors                       bare weights under our names
  convert.py runs/a/model.pyth a_timm.safetensors --to timm        for timm (RGB input)
  convert.py vit.pth ours.pyth --from timm --family vit            from timm, DeiT, MAE or DINO
  convert.py runs/a/model.pyth a.onnx --pixels                     ONNX that takes RGB images on 0..255
  convert.py --plugin my_net.py runs/b/model.pyth b.onnx           of a plug-in's model
  convert.py runs/a/checkpoints/model_epoch_0009.shards a.pyth     one file of a sharded checkpoint, with all it holds
"""


def family_of(path: str, content, asked):
    """The family whose names a file has: as asked, or from the config in a checkpoint."""
    if asked:
        return asked
    import yaml

    tree = yaml.safe_load(content["cfg"]) if isinstance(content.get("cfg"), str) else {}
    kind = tree.get("MODEL", {}).get("TYPE", "")
    if kind == "regnet":
        return "regnety" if tree["REGNET"]["SE_ON"] else "regnetx"
    if kind not in ("vit", "resnet"):
        raise UserError(f"{path}: which kind of model is it? Give --family")
    return kind


def weights_of(content):
    """The tensors of a checkpoint (the better of model and EMA) or a bare state dict."""
    from pycls.core.fitting import better_state

    return better_state(content)


def check_target(source: str, target: str) -> None:
    """Refuses to write over what is read: bare weights would take the place of a whole checkpoint."""
    if os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target):
        raise UserError(f"{target}: is the very file that is converted ({source}); give another name for the result")


def export(args) -> str:
    """Writes the ONNX file."""
    from pycls.core.saved import load_saved
    from pycls.models.convert import export_onnx

    saved = load_saved(args.source, args.cfg)
    facts = {**saved.preparation.facts, "class_names": saved.class_names}
    return export_onnx(saved.model, args.target, facts, args.pixels)


def convert(args) -> str:
    """Writes the weights under other names, or all of a sharded checkpoint as one file."""
    from pycls.core.checkpoint import read_checkpoint, write_checkpoint
    from pycls.core.checkpoint_shards import is_shards
    from pycls.models import convert as c

    if args.source_library == args.target_library != "pycls":
        raise UserError(f"--from and --to are both {args.source_library}: nothing to convert")
    content = read_checkpoint(args.source)
    if is_shards(args.source) and args.target_library == "pycls" and args.target.endswith(".pyth"):
        return write_checkpoint(content, os.path.abspath(args.target))
    state, turn = weights_of(content), not args.keep_channels
    for library, function in ((args.source_library, c.from_library), (args.target_library, c.to_library)):
        if library != "pycls":
            state = function(state, family_of(args.source, content, args.family), library, turn)
    return c.write_weights(state, args.target)


def main() -> None:
    import argparse

    from pycls.models.convert import FAMILIES, LIBRARIES

    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        description="Convert weights between libraries and formats.", epilog=_EPILOG, formatter_class=formatter
    )
    parser.add_argument("source", help="checkpoint (file or folder of shards), bare state dict or .safetensors")
    parser.add_argument("target", help="file to write: .safetensors, .onnx, anything else for torch.load")
    names = ("pycls", *LIBRARIES)
    parser.add_argument("--from", dest="source_library", default="pycls", choices=names, help="whose names it has")
    parser.add_argument("--to", dest="target_library", default="pycls", choices=names, help="whose names it gets")
    parser.add_argument("--family", choices=FAMILIES, help="kind of model (default: from the config in the file)")
    parser.add_argument("--keep-channels", action="store_true", help="do not turn BGR into RGB or back")
    parser.add_argument("--cfg", help="ONNX: config of bare weights, which hold none")
    parser.add_argument("--pixels", action="store_true", help="ONNX: take RGB images on 0..255")
    parser.add_argument("--plugin", action="append", default=[], metavar="FILE_OR_MODULE",
                        help="ONNX: Python code that registers the model; may be repeated")  # fmt: skip
    args = parser.parse_args()
    check_target(args.source, args.target)
    load_plugins(args.plugin)
    print(export(args) if args.target.endswith(".onnx") else convert(args))


if __name__ == "__main__":
    sys.exit(guarded(main))
