"""What is trained: model, data, objective, metric. One file or folder each."""

from fedasync.workloads.classification import Classification
from fedasync.workloads.digits import Digits
from fedasync.workloads.optimizer import LocalTraining
from fedasync.workloads.partition import Dirichlet, Iid, LabelShards, Partition
from fedasync.workloads.protocol import BatchedWorkload, Task, Workload
from fedasync.workloads.quadratic import Quadratic

__all__ = [
    "BatchedWorkload",
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
