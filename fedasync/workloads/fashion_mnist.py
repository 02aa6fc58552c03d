"""Fashion-MNIST: images of clothes, from Debian's package or any folder of IDX files."""

from __future__ import annotations

from pathlib import Path

from fedasync.workloads.idx import read_image_folder
from fedasync.workloads.images import ImageClassification, Images

DEBIAN_FOLDER = "/usr/share/datasets/fashion-mnist"


class FashionMnist(ImageClassification):
    """60,000 training and 10,000 test images of 28 × 28 pixels in ten classes (Xiao, Rasul and Vollgraf 2017).

    ``path`` is a folder of IDX files, plain or gzipped; without it, that of Debian's package
    ``dataset-fashion-mnist``. ``partition`` deals ``train_samples`` of the training images (all of them) to
    ``clients`` (100 when not given) from ``seed``; ``test_samples`` limits the test set. Both limits take the same
    images in every run. ``model`` is an MLP 784-``hidden``-10 or a CNN of two 3 × 3 convolutions (20,490
    parameters).

    Raises ValueError for parameters out of range and for files that are missing or broken; ImportError without torch.
    """

    kind = "fashion_mnist"
    usual_clients = 100

    @staticmethod
    def read(path: str | None) -> Images:
        folder = Path(DEBIAN_FOLDER if path is None else path)
        if not folder.is_dir():
            raise ValueError(
                f"FashionMnist: there is no folder {folder}: apt-get install dataset-fashion-mnist (Debian, Ubuntu),"
                " or give path, a folder of IDX files"
            )
        return read_image_folder(folder)
