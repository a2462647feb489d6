#!/usr/bin/env python3
"""Draw learning curves: plot_log.py OUT_DIR_OR_LOG [...] [--names NAME ...] [--metric top1_err] [-o curves.png]."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from pycls.core import plotting
from pycls.core.cli import Parser, guarded, png_file
from pycls.core.errors import UserError


def main() -> None:
    parser = Parser(description="Draw the learning curves of one or several runs as a PNG.")
    parser.add_argument("paths", nargs="+", metavar="OUT_DIR_OR_LOG", help="output folders or log files")
    parser.add_argument("--names", nargs="+", help="names for the legend, one per log")
    parser.add_argument("--metric", default="top1_err", choices=["top1_err", "top5_err"], help="error to draw")
    parser.add_argument(
        "-o", "--output", default="curves.png", type=png_file, help="PNG to write (default: curves.png)"
    )
    args = parser.parse_args()
    names = args.names or plotting.names_of(args.paths)
    if len(names) != len(args.paths):
        raise UserError(f"--names: {len(names)} names for {len(args.paths)} logs")
    logs = [plotting.log_file_of(path) for path in args.paths]
    print(plotting.plot_error_curves(logs, names, args.output, args.metric))


if __name__ == "__main__":
    sys.exit(guarded(main))
