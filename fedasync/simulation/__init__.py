"""SimPy: client populations, networks, availability, and learning on virtual time."""

from fedasync.simulation.availability import Always, Availability, Intervals, OnOff
from fedasync.simulation.federated import FederatedSimulation, NothingAcceptedError
from fedasync.simulation.laws import (
    Constant,
    Empirical,
    Exponential,
    HalfNormal,
    Law,
    Lognormal,
    Pareto,
    ShiftedExponential,
    Uniform,
    Values,
)
from fedasync.simulation.learning import WorkloadError
from fedasync.simulation.population import Clients, Population
from fedasync.simulation.settings import Settings
from fedasync.simulation.simulate import RunRequest, simulate, simulate_together

__all__ = [
    "Always",
    "Availability",
    "Clients",
    "Constant",
    "Empirical",
    "Exponential",
    "FederatedSimulation",
    "HalfNormal",
    "Intervals",
    "Law",
    "Lognormal",
    "NothingAcceptedError",
    "OnOff",
    "Pareto",
    "Population",
    "RunRequest",
    "Settings",
    "ShiftedExponential",
    "Uniform",
    "Values",
    "WorkloadError",
    "simulate",
    "simulate_together",
]
