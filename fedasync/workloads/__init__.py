"""What is trained: model, data, objective, metric. One file or folder each."""

from fedasync.workloads.classification import Classification
from fedasync.workloads.digits import Digits
from fedasync.workloads.partition import Dirichlet, Iid, LabelShards, Partition
from fedasync.workloads.protocol import Task, Workload
from fedasync.workloads.quadratic import Quadratic
from fedasync.workloads.training import LocalTraining

__all__ = [
    "Classification",
    "Digits",
    "Dirichlet",
    "Iid",
    "LabelShards",
    "LocalTraining",
    "Partition",
    "Quadratic",
    "Task",
    "Workload",
]
