"""Packaging of pycls; what is needed to run, and what only some uses need."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+?)"', (HERE / "pycls" / "__init__.py").read_text()).group(1)

EXTRAS = {
    "digits": ["scikit-learn"],
    "tensorboard": ["tensorboard"],
    "slurm": ["submitit"],
    "fsdp": ["fairscale"],
    "export": ["safetensors", "onnx", "onnxruntime"],
}
EXTRAS["test"] = [
    "pytest",
    "pytest-xdist",
    "ruff",
    "transformers",
    *EXTRAS["digits"],
    *EXTRAS["tensorboard"],
    *EXTRAS["export"],
    *EXTRAS["fsdp"],
    *EXTRAS["slurm"],
]
EXTRAS["all"] = sorted({name for names in EXTRAS.values() for name in names})

setup(
    name="pycls",
    version=VERSION,
    description="Trains, tests and times image classifiers",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    # The configs are part of the package when it is installed: the model zoo reads them.
    packages=[*find_packages(include=["pycls", "pycls.*"]), "pycls.configs"],
    package_dir={"pycls.configs": "configs"},
    package_data={"pycls.configs": ["**/*.yaml"]},
    install_requires=[
        "torch>=2.6",
        "numpy",
        "fvcore",
        "iopath",
        "pyyaml",
        "simplejson",
        "portalocker",
        "opencv-python-headless",
        "pillow",
        "tqdm",
        "matplotlib",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["pycls = pycls.core.cli:main"]},
)
