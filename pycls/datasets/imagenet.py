"""ImageNet's layout: DATA_DIR/SPLIT/n########/*.JPEG, with PyCls's training and test pipelines."""

from pycls.datasets.imagefolder import ImageFolder


class ImageNet(ImageFolder):
    """Class folders are WordNet ids; every split has them all, numbered in the order of the ids."""

    class_pattern, class_words = r"n[0-9]+", "folders named n########"
    split_file_allowed = False
