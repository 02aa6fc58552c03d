"""Decisions without I/O: the four choices of a strategy, and the coordinator that carries them out.

Standard library only. ``Coordinator`` is driven by a virtual clock, a real one, or a recorded log.
"""

from fedasync.core.admission import Admission, Cohort, Concurrency, StalenessBudget, SyncBudget
from fedasync.core.buffering import Barrier, Buffer, Grouped, Periodic, Quota, Sliding, Tumbling
from fedasync.core.combined_publication import (
    AllOf,
    AnyOf,
    AtLeast,
    ForceAfter,
    Publication,
    WithinStaleness,
)
from fedasync.core.compass import Compass
from fedasync.core.coordinator import Coordinator
from fedasync.core.events import (
    Accepted,
    Arrival,
    Cancelled,
    Event,
    Failed,
    Lease,
    Published,
    Rejected,
    Step,
    StepReady,
)
from fedasync.core.ledger import Ledger
from fedasync.core.log import KINDS, EventLog
from fedasync.core.measured_publication import (
    DeterminantDoubled,
    Disagreement,
    Distance,
    EpisodeEnd,
    FeatureCosine,
    Kl,
    MinEigenvalueDoubled,
    VisitsDoubled,
)
from fedasync.core.publication import EveryN, EveryVersion, Exponential, Linear
from fedasync.core.staleness import Constant, Hinge, Polynomial, Staleness
from fedasync.core.strategy import Strategy
from fedasync.core.tiers import Tiers
from fedasync.core.timeouts import AdaptiveTimeout

__all__ = [
    "KINDS",
    "Accepted",
    "AdaptiveTimeout",
    "Admission",
    "AllOf",
    "AnyOf",
    "Arrival",
    "AtLeast",
    "Barrier",
    "Buffer",
    "Cancelled",
    "Cohort",
    "Compass",
    "Concurrency",
    "Constant",
    "Coordinator",
    "DeterminantDoubled",
    "Disagreement",
    "Distance",
    "EpisodeEnd",
    "Event",
    "EventLog",
    "EveryN",
    "EveryVersion",
    "Exponential",
    "Failed",
    "FeatureCosine",
    "ForceAfter",
    "Grouped",
    "Hinge",
    "Kl",
    "Lease",
    "Ledger",
    "Linear",
    "MinEigenvalueDoubled",
    "Periodic",
    "Polynomial",
    "Publication",
    "Published",
    "Quota",
    "Rejected",
    "Sliding",
    "Staleness",
    "StalenessBudget",
    "Step",
    "StepReady",
    "Strategy",
    "SyncBudget",
    "Tiers",
    "Tumbling",
    "VisitsDoubled",
    "WithinStaleness",
]
