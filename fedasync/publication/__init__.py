"""What publication rules look at: how far two versions have drifted apart, and what was learnt since the last one.

The rules themselves are decisions, ``fedasync.core``; here are the measures of arrays (numpy only) that a runtime takes
for them, and a model of such measures for runs without a policy.
"""

from fedasync.publication.divergence import action_disagreement, categorical_kl, feature_cosine, gaussian_kl
from fedasync.publication.information import InformationMatrix, SimHash, VisitCounts
from fedasync.publication.modelled import ModelledDivergence
from fedasync.publication.rsi import switching_improvement

__all__ = [
    "InformationMatrix",
    "ModelledDivergence",
    "SimHash",
    "VisitCounts",
    "action_disagreement",
    "categorical_kl",
    "feature_cosine",
    "gaussian_kl",
    "switching_improvement",
]
