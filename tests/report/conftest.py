"""Studies that the tests of the report share; runs are not changed by reading them."""

from __future__ import annotations

from functools import partial

import pytest

from fedasync.runs.run import Run

from .synthetic import asynchronous, cohort


@pytest.fixture(scope="session")
def study() -> list[Run]:
    """Three strategies × two tails × three seeds; FedAsync learns too little to reach the target."""
    runs = []
    for tail in ("0.3", "1.2"):
        for seed in range(3):
            at = {"tail": tail}
            for name, make in (
                ("FedAvg", cohort),
                ("FedBuff", partial(asynchronous, gain=1.5, most_stale=3)),
                ("FedAsync", partial(asynchronous, gain=0.3, buffer=1)),
            ):
                runs.append(make(labels={"strategy": name, **at}, seed=seed, tail=float(tail), end_s=60.0))
    return runs


@pytest.fixture(scope="session")
def timing_study() -> list[Run]:
    """Two strategies × two seeds without a model."""
    return [
        make(seed=seed, labels={"strategy": name}, timing_only=True, clients=14, end_s=30.0)
        for seed in range(2)
        for name, make in (("FedAvg", cohort), ("FedBuff", asynchronous))
    ]
