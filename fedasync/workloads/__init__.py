"""What is trained: model, data, objective, metric. One file or folder each."""

from fedasync.workloads.classification import Classification
from fedasync.workloads.digits import Digits
from fedasync.workloads.fashion_mnist import FashionMnist
from fedasync.workloads.hf_datasets import DatasetFolder, FlowerPartitioner
from fedasync.workloads.mnist import Mnist
from fedasync.workloads.optimizer import LocalTraining
from fedasync.workloads.partition import Dirichlet, Iid, LabelShards, Partition
from fedasync.workloads.protocol import BatchedWorkload, Task, Workload
from fedasync.workloads.quadratic import Quadratic
from fedasync.workloads.shakespeare import Shakespeare
from fedasync.workloads.tabular import Tabular

__all__ = [
    "BatchedWorkload",
    "Classification",
    "DatasetFolder",
    "Digits",
    "Dirichlet",
    "FashionMnist",
    "FlowerPartitioner",
    "Iid",
    "LabelShards",
    "LocalTraining",
    "Mnist",
    "Partition",
    "Quadratic",
    "Shakespeare",
    "Tabular",
    "Task",
    "Workload",
]
