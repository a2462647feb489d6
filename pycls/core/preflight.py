"""What the config alone can tell of a run that can't work, told before anything is logged or written."""

from pycls.core import builders, checkpoint, net
from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.io import pathmgr
from pycls.datasets import loader


def check(mode: str) -> None:
    """Checks what `mode` train, test or time needs besides the data: model, loss, data sets by name, weights.

    Timing does without a data set, and testing without a loss.

    Raises:
        UserError: names the key.
    """
    model = builders.get_model()
    # Counting goes through all layers and builds none. A plug-in that does not count itself would have to be built.
    if hasattr(model, "complexity"):
        net.complexity(model)
    if mode != "test":
        builders.get_loss_fun()
    if mode == "train":
        loader.check_keys("TRAIN.DATASET", "TEST.DATASET")
        # A run that goes on has no use for the weights that it started from.
        if not (cfg.TRAIN.AUTO_RESUME and checkpoint.has_checkpoint()):
            _check_weights("TRAIN.WEIGHTS", cfg.TRAIN.WEIGHTS)
    if mode == "test":
        loader.check_keys("TEST.DATASET")
        _check_weights("TEST.WEIGHTS", cfg.TEST.WEIGHTS)


def _check_weights(key: str, path: str) -> None:
    if path and not pathmgr.exists(path):
        raise UserError(f"{key}: {path}: there is no such checkpoint")
