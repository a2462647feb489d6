"""The global config: load, override, validate, save.

    from pycls.core.config import cfg

`cfg` is declared in `options.py`. Values come from a YAML file (safe loader only: a config can
never run code) and then from KEY VALUE words; every mistake names the key and where it stood.
"""

import argparse
import ast
import copy
import math
import os
import warnings
from contextlib import contextmanager
from typing import Any, Dict, Iterator, Tuple

import yaml
from fvcore.common.config import CfgNode as _CfgNode

from pycls.core.errors import UserError, nearest
from pycls.core.io import atomic_write, cache_url, pathmgr
from pycls.core.options import DEPRECATED, OPTIONS
from pycls.datasets.augment import make_augment


class CfgNode(_CfgNode):
    """fvcore's CfgNode with one checked way to set a value, used for files and command line alike."""

    def flat(self, prefix: str = "") -> Iterator[Tuple[str, Any]]:
        """Yields (dotted key, value) for every value in the tree."""
        for name, value in self.items():
            if isinstance(value, _CfgNode):
                yield from CfgNode.flat(value, f"{prefix}{name}.")
            else:
                yield prefix + name, value

    def assign(self, key: str, value: Any, source: str) -> None:
        """Sets one dotted key, converting `value` to the key's type.

        Args:
            source: where the value stood, for messages, e.g. a file or 'command line, word 3'.
        Raises:
            UserError: unknown key, or a value of the wrong type.
        """
        if key in DEPRECATED:
            warnings.warn(f"{source}: {key} has no effect any more and is ignored", stacklevel=2)
            return
        node, name = self, key
        while "." in name and isinstance(node, _CfgNode):
            head, name = name.split(".", 1)
            node = node.get(head)
        if not isinstance(node, _CfgNode) or name not in node:
            raise UserError(f"{source}: unknown key {key}{nearest(key, (k for k, _ in self.flat()))}")
        if isinstance(node[name], _CfgNode):
            raise UserError(f"{source}: {key} is a group of keys, it can't be set to {value!r}")
        node[name] = _convert(key, value, node[name], source)

    def merge_from_list(self, cfg_list) -> None:
        """Applies [KEY, VALUE, KEY, VALUE, ...]."""
        words = list(cfg_list)
        for i, key in enumerate(words[::2]):
            if "=" in str(key):
                raise UserError(f"command line: write KEY VALUE, not KEY=VALUE, in {key!r}")
            if 2 * i + 1 == len(words):
                raise UserError(f"command line: overrides come as KEY VALUE pairs, {key} has no value")
            self.assign(str(key), words[2 * i + 1], f"command line, word {2 * i + 1}")

    def merge_from_file(self, cfg_filename: str, allow_unsafe: bool = False) -> None:
        """Applies a YAML file. `allow_unsafe` is refused: a config can never run code."""
        if allow_unsafe:
            raise UserError(f"{cfg_filename}: configs are only read with a safe loader")
        self.merge_from_text(_read(cfg_filename), cfg_filename)

    def merge_from_text(self, text: str, source: str, skip_unknown: bool = False) -> None:
        """Applies YAML text that came from `source`; `skip_unknown` only warns of keys that there are none of here."""
        try:
            tree = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f", line {mark.line + 1}" if mark else ""
            problem = getattr(error, "problem", None) or str(error).splitlines()[0]
            raise UserError(f"{source}{where}: not valid YAML: {problem}") from None
        if not isinstance(tree, (dict, type(None))):
            raise UserError(f"{source}: a config is a table of KEY: VALUE, not a {type(tree).__name__}")
        known = {key for key, _ in self.flat()}
        for key, value in flatten(tree or {}):
            if skip_unknown and key not in known and key not in DEPRECATED:
                warnings.warn(f"{source}: unknown key {key} is ignored", stacklevel=2)
            else:
                self.assign(key, value, source)


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice, which plain YAML silently overrides."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key} stands twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def flatten(tree: Dict, prefix: str = "") -> Iterator[Tuple[str, Any]]:
    """Yields (dotted key, value) for every value in a tree as YAML gives it."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _convert(key: str, value: Any, old: Any, source: str) -> Any:
    """Returns `value` as the type of `old`; text such as 1e-5 or [1, 2] is read as a literal."""
    wanted = type(old)
    if wanted is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return _unquote(value) if isinstance(value, str) else str(value)
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            # Not a Python literal: it stays text, and the type check below decides; yes/true as in YAML.
            value = {"true": True, "false": False}.get(value.lower(), value)
    if wanted is float and type(value) is int:
        value = float(value)
    if wanted is list and isinstance(value, tuple):
        value = list(value)
    if type(value) is not wanted:
        kind = {float: "a number", int: "an integer", bool: "True or False", list: "a list", str: "text"}
        raise UserError(f"{source}: {key} must be {kind.get(wanted, wanted.__name__)}, not {value!r}")
    if wanted is list and any(isinstance(v, (str, dict, list)) for v in value):
        raise UserError(f"{source}: {key} must be a list of numbers, not {value!r}")
    return value


def _unquote(text: str) -> str:
    """Strips one pair of quotes that a shell or a nested YAML left around a word."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _read(path: str) -> str:
    try:
        with pathmgr.open(path, "r") as f:
            return f.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise UserError(f"--cfg {path}: can't be read: {reason}") from None


def _defaults() -> CfgNode:
    root = CfgNode()
    for option in OPTIONS:
        node = root
        *groups, name = option.key.split(".")
        for group in groups:
            node = node.setdefault(group, CfgNode())
        node[name] = list(option.default) if isinstance(option.default, list) else option.default
    return root


# The one global config, and PyCls's other name for it.
cfg = _C = _defaults()


def reset_cfg() -> None:
    """Sets the global config back to its defaults (unfreezing it); keys that a plug-in added stay."""
    cfg.defrost()
    for key, value in _defaults().flat():
        cfg.assign(key, value, "defaults")


@contextmanager
def temporary_cfg() -> Iterator[CfgNode]:
    """The global config at its defaults, unfrozen; what it was before is put back in the end, whatever happens."""
    before, frozen = copy.deepcopy(list(cfg.flat())), cfg.is_frozen()
    reset_cfg()
    try:
        yield cfg
    finally:
        cfg.defrost()
        for key, value in before:
            cfg.assign(key, value, "former config")
        if frozen:
            cfg.freeze()


def load_cfg(cfg_file: str) -> None:
    """Merges a YAML file into the global config."""
    cfg.merge_from_file(cfg_file)


def dump_cfg() -> str:
    """Writes the merged config to OUT_DIR/CFG_DEST and returns that path."""
    path = os.path.join(cfg.OUT_DIR, cfg.CFG_DEST)
    with atomic_write(path) as f:
        f.write(cfg.dump().encode())
    return path


def load_cfg_fom_args(description: str = "Config options.") -> None:
    """Loads `--cfg FILE KEY VALUE ...` from the command line (PyCls's name, typo included)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cfg", dest="cfg_file", required=True, help="config file")
    parser.add_argument("opts", nargs=argparse.REMAINDER, help="KEY VALUE overrides")
    args = parser.parse_args()
    load_cfg(args.cfg_file)
    cfg.merge_from_list(args.opts)


def assert_and_infer_cfg(cache_urls: bool = True) -> None:
    """PyCls's name for validation; also fetches weights given as a URL when `cache_urls`."""
    validate_cfg()
    if cache_urls:
        for node in (cfg.TRAIN, cfg.TEST):
            node.WEIGHTS = cache_url(node.WEIGHTS, cfg.DOWNLOAD_CACHE)


def validate_cfg() -> None:
    """Checks every value and combination of the global config; changes nothing.

    Raises:
        UserError: names the key, its value and what is allowed.
    """
    values = dict(cfg.flat())
    for option in OPTIONS:
        _validate_option(option, values[option.key])
    for rule in _RULES:
        rule()


def _validate_option(option, value) -> None:
    if option.choices is not None and value not in option.choices:
        allowed = ", ".join(repr(c) for c in option.choices)
        raise UserError(f"{option.key}: {value!r} is not allowed{nearest(value, option.choices)}; allowed: {allowed}")
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            raise UserError(f"{option.key}: {number} is not a number that can be used")
        if isinstance(value, list) and isinstance(option.low, int) and type(number) is not int:
            raise UserError(f"{option.key}: {value} must hold whole numbers")
        if option.low is not None and number < option.low:
            raise UserError(f"{option.key}: {value} is too small, at least {option.low}")
        if option.high is not None and number > option.high:
            raise UserError(f"{option.key}: {value} is too large, at most {option.high}")


def _rule_schedule() -> None:
    o = cfg.OPTIM
    if o.LR_POLICY == "exp" and o.MIN_LR <= 0:
        raise UserError("OPTIM.MIN_LR: 0 is not allowed with OPTIM.LR_POLICY exp, it must be above 0")
    if o.LR_POLICY == "steps":
        if not o.STEPS or o.STEPS[0] != 0:
            raise UserError(f"OPTIM.STEPS: {o.STEPS} must start with 0 for OPTIM.LR_POLICY steps")
        if sorted(o.STEPS) != o.STEPS:
            raise UserError(f"OPTIM.STEPS: {o.STEPS} must rise")
    if o.OPTIMIZER == "sgd" and o.NESTEROV and (o.MOMENTUM == 0 or o.DAMPENING != 0):
        raise UserError(
            f"OPTIM.NESTEROV: True needs MOMENTUM above 0 and DAMPENING 0, not {o.MOMENTUM} and {o.DAMPENING}"
        )


def _rule_batches() -> None:
    parts = cfg.NUM_GPUS * cfg.OPTIM.ACCUM_ITERS
    if cfg.TRAIN.BATCH_SIZE % parts:
        raise UserError(
            f"TRAIN.BATCH_SIZE: the global batch of {cfg.TRAIN.BATCH_SIZE} does not divide by NUM_GPUS "
            f"{cfg.NUM_GPUS} times OPTIM.ACCUM_ITERS {cfg.OPTIM.ACCUM_ITERS}; "
            f"the nearest below is {cfg.TRAIN.BATCH_SIZE // parts * parts or parts}"
        )
    if cfg.TEST.BATCH_SIZE % cfg.NUM_GPUS:
        raise UserError(
            f"TEST.BATCH_SIZE: the global batch of {cfg.TEST.BATCH_SIZE} does not divide by NUM_GPUS {cfg.NUM_GPUS}; "
            f"the nearest below is {cfg.TEST.BATCH_SIZE // cfg.NUM_GPUS * cfg.NUM_GPUS or cfg.NUM_GPUS}"
        )


def _rule_sharding() -> None:
    size = cfg.FSDP.SHARD_SIZE
    if cfg.FSDP.ENABLED and size and cfg.NUM_GPUS % size:
        raise UserError(f"FSDP.SHARD_SIZE: {size} does not divide NUM_GPUS {cfg.NUM_GPUS}")
    if len(cfg.PORT_RANGE) != 2 or cfg.PORT_RANGE[0] > cfg.PORT_RANGE[1]:
        raise UserError(f"PORT_RANGE: {cfg.PORT_RANGE} must be [lowest, highest]")


def _rule_data() -> None:
    if os.path.basename(cfg.CFG_DEST) != cfg.CFG_DEST or not cfg.CFG_DEST:
        raise UserError(f"CFG_DEST: {cfg.CFG_DEST!r} must be a plain file name, it is written inside OUT_DIR")
    make_augment(cfg.TRAIN.AUGMENT)


_RULES = (_rule_schedule, _rule_batches, _rule_sharding, _rule_data)
