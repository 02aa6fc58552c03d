"""Fashion-MNIST: images of clothes, from Debian's package or any folder of IDX files."""

from __future__ import annotations

from pathlib import Path

from fedasync.workloads.idx import read_image_folder
from fedasync.workloads.images import ImageClassification
from fedasync.workloads.modules import ImageModel
from fedasync.workloads.optimizer import LocalTraining
from fedasync.workloads.partition import Dirichlet, Partition
from fedasync.workloads.samples import need_torch

DEBIAN_FOLDER = "/usr/share/datasets/fashion-mnist"


class FashionMnist(ImageClassification):
    """60,000 training and 10,000 test images of 28 × 28 pixels in ten classes (Xiao, Rasul and Vollgraf 2017).

    ``path`` is a folder of IDX files, plain or gzipped; without it, that of Debian's package
    ``dataset-fashion-mnist``. ``partition`` deals ``train_samples`` of the training images (all of them) to
    ``clients`` from ``seed``; ``test_samples`` limits the test set. Both limits take the same images in every run.
    ``model`` is an MLP 784-``hidden``-10 or a CNN of two 3 × 3 convolutions (20,490 parameters).

    Raises ValueError for parameters out of range and for files that are missing or broken; ImportError without torch.
    """

    def __init__(
        self,
        path: str | None = None,
        clients: int = 100,
        partition: Partition = Dirichlet(0.5),
        model: ImageModel = "mlp",
        hidden: int = 64,
        train_samples: int | None = None,
        test_samples: int | None = None,
        local: LocalTraining = LocalTraining(),
        seed: int = 0,
    ) -> None:
        need_torch("fashion_mnist")
        folder = Path(DEBIAN_FOLDER if path is None else path)
        if not folder.is_dir():
            raise ValueError(
                f"FashionMnist: there is no folder {folder}: apt-get install dataset-fashion-mnist (Debian, Ubuntu),"
                " or give path, a folder of IDX files"
            )
        train, test, shape = read_image_folder(folder)
        super().__init__(
            train, test, shape, clients, partition, model, hidden, train_samples, test_samples, local, seed
        )
