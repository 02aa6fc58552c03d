"""SimPy: client populations, networks, availability, and learning on virtual time."""

from fedasync.federated.arrays import WorkloadError
from fedasync.federated.driver import NothingAcceptedError
from fedasync.simulation.availability import (
    Always,
    Availability,
    AvailabilityFile,
    ByLabels,
    Daily,
    Intervals,
    OnOff,
)
from fedasync.simulation.devices import Tier
from fedasync.simulation.federated import FederatedSimulation
from fedasync.simulation.laws import (
    Constant,
    Empirical,
    Exponential,
    HalfNormal,
    Law,
    Lognormal,
    Normal,
    Pareto,
    ShiftedExponential,
    Uniform,
    Values,
    Zipf,
)
from fedasync.simulation.outages import OutagesOnOff, OutageTimes
from fedasync.simulation.population import Clients, Population
from fedasync.simulation.recorded import Capacity
from fedasync.simulation.settings import Settings
from fedasync.simulation.simulate import RunRequest, simulate, simulate_together
from fedasync.simulation.traces import Trace

__all__ = [
    "Always",
    "Availability",
    "AvailabilityFile",
    "ByLabels",
    "Capacity",
    "Clients",
    "Constant",
    "Daily",
    "Empirical",
    "Exponential",
    "FederatedSimulation",
    "HalfNormal",
    "Intervals",
    "Law",
    "Lognormal",
    "Normal",
    "NothingAcceptedError",
    "OnOff",
    "OutageTimes",
    "OutagesOnOff",
    "Pareto",
    "Population",
    "RunRequest",
    "Settings",
    "ShiftedExponential",
    "Tier",
    "Trace",
    "Uniform",
    "Values",
    "WorkloadError",
    "Zipf",
    "simulate",
    "simulate_together",
]
