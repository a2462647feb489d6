#!/usr/bin/env python3
"""Classify pictures with a checkpoint alone: predict.py model.pyth PICTURE_OR_FOLDER [...] [--format json]."""

import csv
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from pycls.core.cli import Parser, guarded, load_plugins
from pycls.core.errors import UserError

BATCH = 32


def pictures(paths):
    """The picture files that the arguments name, folders searched through, each once and in order."""
    from pycls.datasets.decode import ENDINGS

    found = []
    for path in paths:
        if os.path.isdir(path):
            inside = sorted(inside_folder(path))
            if not inside:
                raise UserError(f"{path}: holds no pictures; accepted endings: {', '.join(ENDINGS)}")
            found += inside
        elif os.path.isfile(path):
            found.append(path)
        else:
            raise UserError(f"{path}: there is no such file or folder")
    return list(dict.fromkeys(found))


def inside_folder(path):
    """Yields the picture files at any depth, those in hidden folders left out."""
    from pycls.datasets.decode import is_hidden, is_picture

    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not is_hidden(name)]
        yield from (os.path.join(folder, name) for name in names if is_picture(name))


def rows(saved, files, most, unreadable):
    """Yields (file, [{"class", "probability"}, ...]), a batch at a time; appends those that can't be read to a list."""
    from pycls.core.saved import predict

    for start in range(0, len(files), BATCH):
        images = dict(decoded(files[start : start + BATCH], unreadable))
        if images:
            yield from zip(images, predict(saved, list(images.values()), most))


def decoded(files, unreadable):
    """Yields (file, picture); a file that can't be read is named, added to a list and left out."""
    from pycls.datasets.decode import decode_image

    for file in files:
        try:
            yield file, decode_image(file)
        except UserError as error:
            print(f"pycls: warning: {error}; left out", file=sys.stderr)
            unreadable.append(file)


def write_text(results):
    for file, classes in results:
        print(file, *(f"{c['class']} {100 * c['probability']:.1f}%" for c in classes), sep="\t")


def write_json(results):
    print(json.dumps([{"file": file, "classes": classes} for file, classes in results], indent=1, ensure_ascii=False))


def write_csv(results):
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["file", "rank", "class", "probability"])
    for file, classes in results:
        writer.writerows((file, i, c["class"], f"{c['probability']:.6f}") for i, c in enumerate(classes, 1))


FORMATS = {"text": write_text, "json": write_json, "csv": write_csv}


def main() -> int:
    parser = Parser(
        description="Print the most probable classes of pictures.",
        epilog="A picture that can't be read is named on standard error and left out; the exit code is then 1.",
    )
    parser.add_argument("weights", help="checkpoint: a path or URL")
    parser.add_argument("paths", nargs="+", metavar="PICTURE_OR_FOLDER")
    parser.add_argument("--top", type=int, default=5, help="how many classes per picture (default: 5)")
    parser.add_argument("--format", default="text", choices=list(FORMATS), help="output (default: text)")
    parser.add_argument("--cfg", help="config of bare weights, which hold none")
    parser.add_argument("--plugin", action="append", default=[], metavar="FILE_OR_MODULE", help="registers the model")
    args = parser.parse_args()
    if args.top < 1:
        raise UserError(f"--top: {args.top} is too small, at least 1")
    files = pictures(args.paths)
    load_plugins(args.plugin)
    from pycls.core.saved import load_saved

    unreadable = []
    FORMATS[args.format](rows(load_saved(args.weights, args.cfg), files, args.top, unreadable))
    return 1 if unreadable else 0


if __name__ == "__main__":
    sys.exit(guarded(main))
