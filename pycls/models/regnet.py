"""RegNet: an AnyNet whose stages follow a quantised line (Radosavovic et al., arXiv 2003.13678)."""

from typing import Dict

import numpy as np

from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.models.anynet import AnyNet
from pycls.models.blocks import adjust_block_compatibility


def generate_regnet(w_a: float, w_0: int, w_m: float, d: int, q: int = 8):
    """Block widths from a line: u_j = w_0 + w_a * j, quantised to w_0 * w_m^k and to multiples of q.

    Returns:
        (stage widths, stage depths, number of stages, of possible stages, width of each block, u).
    Raises:
        UserError: parameters outside of the generator's domain.
    """
    for key, value, good, what in (
        ("WA", w_a, w_a >= 0, "at least 0"),
        ("W0", w_0, w_0 > 0 and w_0 % q == 0, f"a multiple of {q}"),
        ("WM", w_m, w_m > 1, "above 1"),
    ):
        if not good:
            raise UserError(f"REGNET.{key}: {value} is not allowed, it must be {what}")
    ws_cont = np.arange(d) * w_a + w_0
    ks = np.round(np.log(ws_cont / w_0) / np.log(w_m))
    ws_all = w_0 * np.power(w_m, ks)
    ws_all = np.round(np.divide(ws_all, q)).astype(int) * q
    ws, ds = np.unique(ws_all, return_counts=True)
    return ws.tolist(), ds.tolist(), len(ws), int(ks.max()) + 1, ws_all.tolist(), ws_cont.tolist()


def generate_regnet_full():
    """The config's stages: (widths, depths, strides, bottleneck multipliers, group widths)."""
    r = cfg.REGNET
    ws, ds = generate_regnet(r.WA, r.W0, r.WM, r.DEPTH)[:2]
    ws, bs, gs = adjust_block_compatibility(ws, [r.BOT_MUL] * len(ws), [r.GROUP_W] * len(ws))
    return ws, ds, [r.STRIDE] * len(ws), bs, gs


def regnet_cfg_to_anynet_cfg() -> None:
    """Rewrites the global config: the RegNet of REGNET becomes the same network as an ANYNET."""
    assert cfg.MODEL.TYPE == "regnet"
    ws, ds, ss, bs, gs = generate_regnet_full()
    cfg.MODEL.TYPE = "anynet"
    for name in ("STEM_TYPE", "STEM_W", "BLOCK_TYPE", "SE_ON", "SE_R", "HEAD_W"):
        cfg.ANYNET[name] = cfg.REGNET[name]
    cfg.ANYNET.WIDTHS, cfg.ANYNET.DEPTHS, cfg.ANYNET.STRIDES = ws, ds, ss
    cfg.ANYNET.BOT_MULS, cfg.ANYNET.GROUP_WS = bs, gs


class RegNet(AnyNet):
    """Images (batch, 3, side, side) -> logits (batch, classes)."""

    @staticmethod
    def get_params() -> Dict:
        ws, ds, ss, bs, gs = generate_regnet_full()
        r = cfg.REGNET
        return {
            "stem_type": r.STEM_TYPE,
            "stem_w": r.STEM_W,
            "block_type": r.BLOCK_TYPE,
            "depths": ds,
            "widths": ws,
            "strides": ss,
            "bot_muls": bs,
            "group_ws": gs,
            "head_w": r.HEAD_W,
            "se_r": r.SE_R if r.SE_ON else 0,
            "num_classes": cfg.MODEL.NUM_CLASSES,
        }
