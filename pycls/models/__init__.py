"""The model zoo: `pycls.models.regnety("4.0GF", pretrained=True)` and its siblings."""

# The modules first: importing one later would put it in the place of the function of the same name.
from pycls.models import effnet as _effnet
from pycls.models import resnet as _resnet
from pycls.models import vit as _vit
from pycls.models.model_zoo import effnet, get_model_info, get_model_list, regnetx, regnety, resnet, resnext, vit

__all__ = ["effnet", "get_model_info", "get_model_list", "regnetx", "regnety", "resnet", "resnext", "vit"]

del _effnet, _resnet, _vit
