"""Laws of durations, the empirical one read from a file."""

from __future__ import annotations

import pytest

from fedasync.simulation.laws import Empirical, Law

from .worlds import LAWS


@pytest.fixture(scope="session")
def laws(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Law]:
    """``LAWS`` and the empirical one: a law of each kind."""
    file = tmp_path_factory.mktemp("laws") / "durations.csv"
    file.write_text("device,ms\n" + "".join(f"phone{i},{100 + 37 * i}\n" for i in range(60)))
    return {**LAWS, "empirical": Empirical(str(file), "ms", 1e-3)}
