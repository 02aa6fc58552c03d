"""fedasync: a simulation-first testbed for federated and asynchronous training.

    import fedasync as fa

    run = fa.simulate(fa.strategies.fedfa(concurrency=10), fa.Population(...), fa.workloads.Digits(), time_s=600)

Rooms: ``core`` (decisions), ``aggregation`` (arrays), ``strategies`` (the table), ``workloads``, ``simulation``,
``runs``, ``studies``, ``report``. Importing the package imports no torch.
"""

from fedasync import report, strategies, workloads
from fedasync.core import Strategy, staleness
from fedasync.runs.run import Run
from fedasync.simulation import Clients, Intervals, OnOff, Population, Settings, cluster, laws, simulate
from fedasync.simulation.cluster import Cluster, Prompts, simulate_cluster

__all__ = [
    "Clients",
    "Cluster",
    "Intervals",
    "OnOff",
    "Population",
    "Prompts",
    "Run",
    "Settings",
    "Strategy",
    "cluster",
    "laws",
    "report",
    "simulate",
    "simulate_cluster",
    "staleness",
    "strategies",
    "workloads",
]
