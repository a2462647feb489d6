"""The command line: `pycls` and `tools/run_net.py` are both `main()`."""

import argparse
import errno
import importlib
import importlib.util
import os
import sys
import traceback
import warnings
from typing import Callable, List, Optional

from pycls.core import config
from pycls.core.config import cfg
from pycls.core.errors import OUT_OF_MEMORY, FaultError, UserError, nearest
from pycls.core.options import OPTIONS

_EPILOG = """\
modes:
  info    the model, its flops, parameters and activations, and how it would run here
  train   train, or go on training, in OUT_DIR
  test    test error of the checkpoint TEST.WEIGHTS
  time    how fast the model trains and tests here, and whether the data keep up
  scale   scale the model by MODEL.SCALING_TYPE and MODEL.SCALING_FACTOR; prints the scaled config

examples:
  run_net.py --mode info  --cfg configs/quickstart/vit_digits.yaml
  run_net.py --mode train --cfg configs/quickstart/vit_digits.yaml OUT_DIR runs/a OPTIM.BASE_LR 1e-3
  run_net.py --mode test  --cfg configs/quickstart/vit_digits.yaml TEST.WEIGHTS runs/a/model.pyth
  run_net.py --mode time  --cfg configs/quickstart/vit_digits.yaml PREC_TIME.NUM_ITER 50
  run_net.py --mode train --plugin my_model.py --cfg my_config.yaml MODEL.TYPE my_model
  run_net.py --list-keys OPTIM
"""


class Parser(argparse.ArgumentParser):
    """Answers a mistake with one line instead of the whole usage."""

    def error(self, message):
        raise UserError(f"{message} (see {self.prog} --help)")

    def parse_args(self, *args, **kwargs):
        """As argparse does; flags among KEY VALUE words, which swallow all that follows, are refused."""
        parsed = super().parse_args(*args, **kwargs)
        late = [word for word in getattr(parsed, "opts", [])[::2] if word.startswith("--")]
        if late:
            self.error(f"{late[0]} comes too late: flags go before the KEY VALUE words")
        return parsed


def png_file(path: str) -> str:
    """The name of a picture to write, for argparse."""
    if not path.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"{path} must end with .png, the only kind that is written")
    return path


def _parser() -> argparse.ArgumentParser:
    # Abbreviated flags would make a typo in a flag mean something.
    parser = Parser(
        description="Train, test and time image classifiers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--mode", help="info, train, test, time or scale")
    parser.add_argument("--cfg", dest="cfg_file", metavar="FILE", help="YAML config")
    parser.add_argument("--plugin", action="append", default=[], metavar="FILE_OR_MODULE",
                        help="Python code that registers models, losses or data sets; may be repeated")  # fmt: skip
    parser.add_argument(
        "--list-keys", nargs="?", const="", metavar="PREFIX", help="print the config keys and their meaning"
    )
    parser.add_argument("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config overrides")
    return parser


def main(argv: Optional[List[str]] = None) -> int:
    """Runs the command line; returns the exit code: 0, 2 for a user's mistake, 128 + 15 when stopped by a signal."""
    from pycls.core import watch

    return guarded(lambda: _main(argv), watch.first_to_speak)


def _main(argv: Optional[List[str]]) -> None:
    args = _parser().parse_args(argv)
    if args.list_keys is not None:
        list_keys(args.list_keys)
        return
    modes = {"info": _info, "train": _train, "test": _test, "time": _time, "scale": _scale}
    if args.mode not in modes:
        problem = f"unknown mode {args.mode!r}{nearest(args.mode, modes)}" if args.mode else "which mode?"
        raise UserError(f"--mode: {problem}; allowed: {', '.join(modes)} (see --help)")
    if not args.cfg_file:
        raise UserError("--cfg: which config? Give a YAML file, e.g. --cfg configs/quickstart/vit_digits.yaml")
    load_plugins(args.plugin)
    config.load_cfg(args.cfg_file)
    cfg.merge_from_list(args.opts)
    if not cfg.OUT_DIR:
        cfg.OUT_DIR = os.path.join("output", os.path.splitext(os.path.basename(args.cfg_file))[0])
    config.assert_and_infer_cfg(cache_urls=args.mode in ("train", "test"))
    if args.mode != "scale":
        cfg.freeze()
    if args.mode in ("train", "test", "time"):
        from pycls.core import preflight

        preflight.check(args.mode)
    modes[args.mode]()


def guarded(body: Callable[[], Optional[int]], speak: Callable[[], bool] = lambda: True, name: str = "") -> int:
    """Runs `body`; returns its exit code, having said in one line what a user can mend.

    Args:
        body: may return an exit code of its own. speak: asked before anything is printed.
        name: put before messages, e.g. the rank.
    """
    from pycls.core.distributed import RankFailed
    from pycls.core.interrupt import Interrupted

    warnings.showwarning = _show_warning
    if hasattr(sys.stdout, "reconfigure"):
        # A class or file whose name is no text shall not end the program that prints it. In JSON this is an escape.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = body() or 0
        print(end="", flush=True)
        return code
    except UserError as error:
        return _say(f"pycls: error: {' '.join(str(error).split())}", 2, speak)
    except Interrupted as stop:
        return _say(f"pycls: {stop}", stop.code, speak)
    except FaultError as fault:
        line = f"pycls: error: {' '.join(str(fault).split())}"
        return fault.code if fault.told else _say(line, fault.code, speak)
    except RankFailed as failure:
        return failure.code if failure.told else _say(f"pycls: error: {failure}", failure.code, lambda: True)
    except KeyboardInterrupt:
        return _say("pycls: stopped by Ctrl-C", 130, speak)
    except BrokenPipeError:
        # The reader (head, less) has gone: nothing is left to say.
        _discard(sys.stdout)
        return 0
    except Exception as error:  # noqa: BLE001 - the last stop: our own mistakes are shown whole
        if _out_of_memory(error):
            return _say(f"pycls: error: {name}{_less_memory(error)}", 2, speak)
        if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
            _discard(sys.stdout)
            return _say(f"pycls: error: standard output can't be written: {error.strerror}", 2, speak)
        return _say(name + traceback.format_exc(), 1, speak)


# What the system says of an output that takes no more. Files are written by `io.atomic_write`, which names them.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _out_of_memory(error: Exception) -> bool:
    import torch

    # The allocator of the CPU has no class of error for it.
    allocator = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return allocator or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def _less_memory(error: Exception) -> str:
    """One line on what ran out and which keys make a run smaller."""
    reason = (str(error).splitlines() or ["the host has no more memory to give"])[0]
    if "DataLoader worker" in reason:
        return f"{OUT_OF_MEMORY} ({reason}): lower DATA_LOADER.NUM_WORKERS or DATA_LOADER.PREFETCH"
    train, test = cfg.TRAIN.BATCH_SIZE, cfg.TEST.BATCH_SIZE
    return (
        f"{OUT_OF_MEMORY} ({' '.join(reason.split())[:160]}): lower TRAIN.BATCH_SIZE (now {train}, "
        f"{train // cfg.NUM_GPUS} per process) or, when testing, TEST.BATCH_SIZE (now {test}); or raise "
        "OPTIM.ACCUM_ITERS, set ACT_CHECKPOINT block or FSDP.ENABLED True. --mode time with TIME.SWEEP_BATCH True "
        "finds the largest batch that fits"
    )


def _say(text: str, code: int, speak: Callable[[], bool]) -> int:
    if speak():
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:
            # The terminal was closed: nobody is left to be told, and the code shall still say how it ended.
            _discard(sys.stdout, sys.stderr)
    return code


def _discard(*streams) -> None:
    """Sends what is left in `streams` nowhere: Python would write it at exit, and end with another code if it can't."""
    for stream in streams:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    """A warning is one line; where in our code it arose says nothing to a user."""
    print(f"pycls: warning: {message}", file=sys.stderr)


def load_plugins(names: List[str]) -> None:
    """Imports Python files or modules, which register what they bring; child processes will import them too.

    Raises:
        UserError: no such file or module, or it can't be imported: names the line.
    """
    from pycls.core import distributed

    for name in names:
        try:
            _import(name)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - the code of others may raise anything
            reason = f"{type(error).__name__}: {getattr(error, 'msg', None) or error}"
            raise UserError(f"--plugin {name}: {_line_of(error)}: {reason}") from None
        distributed.PLUGINS.append(os.path.abspath(name) if name.endswith(".py") else name)


def _import(name: str) -> None:
    if name.endswith(".py"):
        if not os.path.isfile(name):
            raise UserError(f"--plugin {name}: there is no such file")
        module = "pycls_plugin_" + os.path.splitext(os.path.basename(name))[0]
        spec = importlib.util.spec_from_file_location(module, name)
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    else:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--plugin {name}: there is no such module; give a file as NAME.py")
        importlib.import_module(name)


def _line_of(error: Exception) -> str:
    """Where an import failed, as 'FILE, line N': the innermost line of the plug-in itself."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    # Outside of it are this file and importlib.
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen ")]
    frames = [f for f in frames if f.filename not in (__file__, importlib.__file__)]
    inside = [f for f in frames if f.filename == frames[0].filename]
    return f"{inside[-1].filename}, line {inside[-1].lineno}" if inside else "can't be imported"


def list_keys(prefix: str = "") -> None:
    """Prints each key that starts with `prefix`: type, default, meaning, allowed values."""
    rows = [o for o in OPTIONS if o.key.lower().startswith(prefix.lower())]
    if not rows:
        raise UserError(
            f"--list-keys {prefix}: no key starts so{nearest(prefix, (o.key.split('.')[0] for o in OPTIONS))}"
        )
    for o in rows:
        allowed = f" Allowed: {', '.join(map(repr, o.choices))}." if o.choices else ""
        print(f"{o.key} ({type(o.default).__name__}, default {o.default!r})\n    {o.meaning}.{allowed}")


# --------------------------------------------------------------------------- modes


def _train() -> None:
    from pycls.core import distributed, trainer

    distributed.run(trainer.train_model)


def _test() -> None:
    from pycls.core import distributed, trainer

    distributed.run(trainer.test_model)


def _time() -> None:
    from pycls.core import distributed, trainer

    distributed.run(trainer.time_model)


def _scale() -> None:
    from pycls.core import net
    from pycls.core.builders import get_model
    from pycls.models import scaler

    scaler.scale_model()
    print(cfg.dump(), end="")
    print(f"# {human_complexity(net.complexity(get_model()))}")


def _info() -> None:
    from pycls.core import builders, distributed, net, parallel, precision

    model = builders.build_model()
    print(model)
    print(human_complexity(net.complexity(builders.get_model())), f"for one image of {cfg.TRAIN.IM_SIZE} px")
    print(f"precision: {precision.mode_of_config()} on {distributed.device_type()}")
    print(f"parallel plan: {parallel.describe()}")
    print(f"global batch: {cfg.TRAIN.BATCH_SIZE}, {cfg.TRAIN.BATCH_SIZE // cfg.NUM_GPUS} per process")
    try:
        distributed.check_process_count()
    except UserError as error:
        print(f"note: training would stop here: {error}")


def human_complexity(counts) -> str:
    """Flops, parameters and activations in human units, e.g. '1.2 GF multiply-adds, 5.1 M parameters, ...'."""

    def human(value, units):
        scale = next((s for s in (1e12, 1e9, 1e6, 1e3) if value >= s), 1)
        return f"{value / scale:.4g} {units[scale]}" if scale > 1 else str(value)

    letters = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k"}
    flops, params, acts = (human(counts[name], letters) for name in ("flops", "params", "acts"))
    return f"flops: {flops} multiply-adds, parameters: {params}, activations: {acts}"


if __name__ == "__main__":
    sys.exit(main())
