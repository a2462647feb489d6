"""What of a checkpoint's content fits a model, an optimizer and the config; refused with reasons where it does not.

Nothing is read or written here: see `checkpoint`.
"""

from itertools import zip_longest
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

import torch
import yaml
from torch import nn

from pycls.core.config import cfg, flatten
from pycls.core.errors import UserError
from pycls.core.logging import get_logger
from pycls.core.options import OPTIONS

logger = get_logger(__name__)

_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_fpw_module.", "model.")

Tensors = Dict[str, torch.Tensor]

# What only the state of some optimizers holds, in a group or beside a tensor.
_MARKS = {"sgd": {"momentum", "momentum_buffer"}, "adam or adamw": {"betas", "exp_avg"}}

# ------------------------------------------------------------------------- weights


def strip_wrappers(state: Dict[str, torch.Tensor], known: Iterable[str] = ()) -> Dict[str, torch.Tensor]:
    """Removes what DDP, FSDP, torch.compile and trainers put into names, nested too, until `known` names appear."""
    for word in ("._orig_mod.", "._fsdp_wrapped_module.", "._fpw_module.", "._checkpoint_wrapped_module."):
        state = {name.replace(word, "."): value for name, value in state.items()}
    known = set(known)
    while state and not known.intersection(state):
        prefix = next((w for w in _WRAPPERS if all(name.startswith(w) for name in state)), None)
        if prefix is None:
            break
        state = {name[len(prefix) :]: value for name, value in state.items()}
    return state


def errors_of(checkpoint: Dict) -> Tuple[float, float]:
    """Test error of model and EMA; files from before these were stored count as 100."""
    return checkpoint.get("test_err", 100), checkpoint.get("ema_err", 100)


def better_name(checkpoint: Dict) -> str:
    """Which weights of a full checkpoint have the lower test error: model_state, also on a tie, or ema_state."""
    test_err, ema_err = errors_of(checkpoint)
    return "ema_state" if ema_err < test_err and "ema_state" in checkpoint else "model_state"


def better_state(checkpoint: Dict, path: str = "checkpoint", known: Iterable[str] = ()) -> Dict[str, torch.Tensor]:
    """The weights in a file's content: of a full checkpoint those with the lower error (the model's on a tie).

    Args:
        known: names at which to stop stripping what wrappers put before them.
    Raises:
        UserError: no weights, or one shard of a sharded model.
    """
    if "model_state" in checkpoint:
        return strip_wrappers(checkpoint[better_name(checkpoint)], known)
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(checkpoint.get(key), dict):
            checkpoint = checkpoint[key]
            break
    state = {name: value for name, value in checkpoint.items() if isinstance(value, torch.Tensor)}
    if any(name.endswith(("_flat_param", "flat_param_0")) for name in state):
        raise UserError(f"{path}: is one shard of a sharded (FSDP) model; merge the shards into one file first")
    if not state:
        raise UserError(f"{path}: holds no tensors; its keys are {', '.join(map(str, list(checkpoint)[:6]))}")
    return strip_wrappers(state, known)


def _adapted(model: nn.Module, state: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """Lets the model adapt weights of another image size (position embeddings), if it knows how."""
    adapt = getattr(model, "adapt_state_dict", None)
    adapted = adapt(state) if adapt else state
    for name in adapted.keys() & state.keys():
        if adapted[name].shape != state[name].shape:
            logger.info(
                "Resized for this image size: %s from %s to %s", name, *(tuple(s[name].shape) for s in (state, adapted))
            )
    return adapted


def _mismatch(own: Tensors, state: Dict[str, torch.Tensor]) -> List[str]:
    """What keeps `state` from fitting a model that has `own` tensors, one text per tensor."""
    rows = [
        f"{name} is {tuple(state[name].shape)} in the file and {tuple(value.shape)} in the model"
        for name, value in own.items()
        if name in state and state[name].shape != value.shape
    ]
    rows += [f"{name} is missing in the file" for name in own if name not in state]
    rows += [f"{name} is not in the model" for name in state if name not in own]
    return rows


def _few(rows: List[str], most: int = 3) -> str:
    more = f"; and {len(rows) - most} more" if len(rows) > most else ""
    return "; ".join(rows[:most]) + more


def tested_state(checkpoint: Dict, model: nn.Module, path: str, own: Optional[Tensors] = None) -> Tensors:
    """Of a file's weights those with the lower test error, made sure to fit `model`.

    Here and below: `own` has the model's names and shapes, where its `state_dict()` is not to be asked for them.
    """
    own = own or model.state_dict()
    return _fitting(better_state(checkpoint, path, own), model, own, path, checkpoint)


def log_tested(checkpoint: Dict, tensors: int, path: str) -> None:
    """Says which weights of a file `tested_state` took, and on which keys their result depends beside them."""
    which = "bare weights"
    if "model_state" in checkpoint:
        whose = {"model_state": "the model's", "ema_state": "the EMA's"}[better_name(checkpoint)]
        which = "{} (test error in the file: model {:.4g}%, EMA {:.4g}%)".format(whose, *errors_of(checkpoint))
    logger.info("Weights from %s: %s; all %d tensors match", path, which, tensors)
    rows = differing_keys(checkpoint)
    if changed := [row for row in rows if _changes_results(row)]:
        logger.warning("%s was trained with other values of %s: its test error will not be what it was",
                       path, "; ".join(changed))  # fmt: skip
    if sizes := [row for row in rows if row.startswith(("TRAIN.IM_SIZE", "TEST.IM_SIZE"))]:
        logger.info("Tested on another image size than the checkpoint's: %s", "; ".join(sizes))


def fitting_state(checkpoint: Dict, name: str, model: nn.Module, path: str, own: Optional[Tensors] = None) -> Tensors:
    """The `model_state` or `ema_state` of a checkpoint, made sure to fit `model` (old files have only the former)."""
    own = own or model.state_dict()
    if "model_state" not in checkpoint:
        raise UserError(f"{path}: holds bare weights, nothing to resume from; give it as TRAIN.WEIGHTS instead")
    state = checkpoint.get(name, checkpoint["model_state"])
    return _fitting(strip_wrappers(state, own), model, own, path, checkpoint)


def _fitting(state: Dict, model: nn.Module, own: Tensors, path: str, checkpoint: Dict) -> Dict[str, torch.Tensor]:
    state = _adapted(model, state)
    rows = _mismatch(own, state)
    if rows:
        keys = _differing_model_keys(checkpoint)
        hint = f" Differing keys: {_few(keys, 6)}." if keys else ""
        raise UserError(f"{path}: does not fit this model.{hint} {_foreign(state, path) or _few(rows)}")
    return state


def fitting_optimizer_state(checkpoint: Dict, optimizer: torch.optim.Optimizer, path: str) -> Dict[str, Any]:
    """The optimizer state of a checkpoint, made sure to fit `optimizer`, with the hyper-parameters of the latter.

    Raises:
        UserError: there is none, or it is another optimizer's, or its groups are of another number or size.
    """
    state = checkpoint.get("optimizer_state")
    if state is None:
        raise UserError(f"{path}: holds no optimizer state; give it as TRAIN.WEIGHTS to load the weights only")
    ours, theirs = _kinds(optimizer.param_groups), _kinds([*state["param_groups"], *state["state"].values()])
    if theirs and theirs != ours:
        raise UserError(
            f"{path}: its optimizer state is that of {theirs} and this config makes {ours}; set OPTIM.OPTIMIZER back, "
            "or start a new OUT_DIR with TRAIN.WEIGHTS to load the weights only"
        )
    ours = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in state["param_groups"]]
    if ours != theirs:
        raise UserError(
            f"{path}: its optimizer has parameter groups of {theirs} tensors and this config makes {ours}; BN, LN or "
            "OPTIM.BIAS weight decay, OPTIM.WEIGHT_DECAY or OPTIM.LAYER_DECAY changed. Set them back, or start a new "
            "OUT_DIR with TRAIN.WEIGHTS to load the weights only"
        )
    groups = [
        {**{k: v for k, v in own.items() if k != "params"}, "params": old["params"]}
        for own, old in zip(optimizer.param_groups, state["param_groups"])
    ]
    return {"state": state["state"], "param_groups": groups}


def _kinds(parts: Iterable[Dict]) -> str:
    """Whose optimizer's groups and per-tensor states `parts` are, by what they hold; '' if it can't be told.

    States may hold what two optimizers left: each keeps what it does not know.
    """
    words = set().union(*parts)
    return " and ".join(kind for kind, marks in _MARKS.items() if marks & words)


def starting_state(checkpoint: Dict, model: nn.Module, path: str, own: Optional[Tensors] = None) -> Tensors:
    """The tensors of a full checkpoint or bare state dict that `model` can start from.

    A classifier for another number of classes is left out, a position embedding for another image size is resized;
    what was matched, skipped (with both shapes), missing and left over is logged.

    Raises:
        UserError: less than half of the model, its classifier left out, is in the file.
    """
    own = own or model.state_dict()
    state = _adapted(model, better_state(checkpoint, path, own))
    matched = {name: v for name, v in state.items() if name in own and v.shape == own[name].shape}
    _check_enough(matched, own, state, path)
    skipped = [
        f"{name} {tuple(v.shape)} in the file, {tuple(own[name].shape)} in the model"
        for name, v in state.items()
        if name in own and v.shape != own[name].shape
    ]
    missing, extra = [n for n in own if n not in state], [n for n in state if n not in own]
    logger.info("Weights from %s: %d matched, %d of another shape, %d missing in the file, %d not in the model",
                path, len(matched), len(skipped), len(missing), len(extra))  # fmt: skip
    for title, rows in (("another shape", skipped), ("missing", missing), ("not in the model", extra)):
        if rows:
            logger.warning("Weights skipped (%s): %s", title, "; ".join(rows))
    return matched


def _check_enough(matched: Tensors, own: Tensors, state: Tensors, path: str) -> None:
    """Refuses weights that leave most of a model at its initial values: that would be training from scratch, unsaid."""
    body = {name: value.numel() for name, value in own.items() if not name.startswith(_classifier(own))}
    found = sum(size for name, size in body.items() if name in matched)
    if matched and 2 * found >= sum(body.values()):
        return
    what = "nothing in it matches this model"
    if matched:
        what = (
            f"only {len(matched)} of the model's {len(own)} tensors, less than half of its weights, match those in it"
        )
    reason = _foreign(state, path) or f"the file has {_few(list(state))}; the model has {_few(list(own))}"
    raise UserError(f"{path}: {what} by name and shape: {reason}")


def _classifier(own: Tensors) -> str:
    """What the names in a model's last module begin with: where models keep their classifier."""
    return list(own)[-1].rpartition(".")[0] + "."


def _foreign(state: Tensors, path: str) -> str:
    """How to convert weights that go by another library's names, '' if they go by none that is known."""
    from pycls.models.convert import recognise  # the models are built by code that needs this module

    known = recognise(state)
    if known is None:
        return ""
    library, family = known
    return f"its names are {library}'s; tools/convert.py {path} ours.pyth --from {library} --family {family} makes ours"


# ------------------------------------------ comparing with the data and the config


def check_class_names(checkpoint: Dict, names: Optional[Sequence[str]], dataset: str, path: str, remedy: str) -> None:
    """Refuses data whose classes are not, number by number, those that a file's weights were trained on.

    Args:
        names: the classes of the data. Where these or the file's are unknown (PyCls stored none), all is accepted.
        dataset: where the data are. remedy: what the user may do.
    """
    theirs, ours = (list(known) if known is not None else [] for known in (checkpoint.get("class_names"), names))
    if not theirs or not ours or theirs == ours:
        return
    at, (old, new) = next((i, pair) for i, pair in enumerate(zip_longest(theirs, ours)) if pair[0] != pair[1])
    raise UserError(
        f"{path}: was trained on {len(theirs)} classes, which are not the {len(ours)} of {dataset}: the first that "
        f"differs is number {at}, {_named(old)} in the file and {_named(new)} in the data. {remedy}"
    )


def _named(name: Optional[str]) -> str:
    return "none" if name is None else repr(name)


def _config_of(checkpoint: Dict) -> Dict[str, Any]:
    """The flat config stored in a checkpoint, empty when there is none."""
    text = checkpoint.get("cfg")
    return dict(flatten(yaml.safe_load(text) or {})) if isinstance(text, str) else {}


_SECTIONS = {"vit": "VIT.", "anynet": "ANYNET.", "regnet": "REGNET.", "resnet": "RESNET.", "effnet": "EN."}
# Keys of models that say how they are trained or computed, not what they compute with weights that are given.
_TRAINING_ONLY = (
    "MODEL.LOSS_FUN", "MODEL.ACTIVATION_INPLACE", "MODEL.SCALING_", "VIT.LAYOUT", "VIT.ATTENTION", "VIT.DROP_PATH",
    "VIT.LAYER_SCALE", "EN.DC_RATIO", "EN.DROPOUT_RATIO",
)  # fmt: skip


def differing_keys(checkpoint: Dict) -> List[str]:
    """'KEY (file: x, config: y)' for every key on which a checkpoint's config and the present one differ."""
    old = _config_of(checkpoint)
    return [f"{k} (file: {old[k]}, config: {v})" for k, v in cfg.flat() if k in old and old[k] != v]


def _differing_model_keys(checkpoint: Dict) -> List[str]:
    """Of `differing_keys` those that may change the shape of a model's tensors."""
    prefixes = ("MODEL.TYPE", "MODEL.DEPTH", "MODEL.NUM_CLASSES", "TRAIN.IM_SIZE", *_sections())
    skip = ("VIT.LAYOUT", "VIT.ATTENTION", "VIT.DROP_PATH")
    return [row for row in differing_keys(checkpoint) if row.startswith(prefixes) and not row.startswith(skip)]


def _changes_results(row: str) -> bool:
    """Whether a row of `differing_keys` makes weights that fit compute something else in a test."""
    if row.startswith(_TRAINING_ONLY):
        return False
    return row.startswith(("MODEL.", "LN.EPS", "BN.EPS", "DATA_LOADER.CHANNEL_ORDER", *_sections()))


def _sections() -> Tuple[str, ...]:
    """The config sections of the model's family; a plug-in's model may read any, and those that it added."""
    if cfg.MODEL.TYPE in _SECTIONS:
        return (_SECTIONS[cfg.MODEL.TYPE],)
    ours = {option.key.split(".")[0] for option in OPTIONS}
    return (*_SECTIONS.values(), *(f"{name}." for name in cfg if name not in ours))
