#!/usr/bin/env python3
"""Train, test and time image classifiers: run_net.py --mode MODE --cfg FILE [KEY VALUE ...]."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from pycls.core.cli import main

if __name__ == "__main__":
    sys.exit(main())
