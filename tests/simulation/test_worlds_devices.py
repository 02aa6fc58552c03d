"""Who is how fast: tiers, speed that goes with data size, recorded capacities, and the laws added for them."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest, spearmanr

from fedasync.simulation.availability import AvailabilityFile, OnOff
from fedasync.simulation.closed_forms import expected_order_statistic
from fedasync.simulation.devices import Tier, preset
from fedasync.simulation.groups import counts, dealt
from fedasync.simulation.laws import (
    Constant,
    Empirical,
    Exponential,
    Law,
    Lognormal,
    Normal,
    Trace,
    Uniform,
    Values,
    Zipf,
)
from fedasync.simulation.population import Clients, Population
from fedasync.simulation.recorded import Capacity
from fedasync.simulation.simulate import simulate
from fedasync.strategies import fedasync
from fedasync.streams import Stream

# -- laws ------------------------------------------------------------------------------------------------------

MIDDLE = (np.arange(200_000) + 0.5) / 200_000
NEW_LAWS = [
    Normal(10.0, 3.0),
    Normal(1.0, 2.0, minimum=0.5),
    Normal(1.0, 2.0, minimum=0.5, below="redraw"),
    Normal(-1.0, 0.5, below="redraw"),
    Zipf(1.2, 16, 180),
    Zipf(2.0, 1, 50, scale=0.1),
    Trace("pai_job4", 3.0),
]


@pytest.mark.parametrize("law", NEW_LAWS, ids=str)
def test_the_mean_is_the_integral_of_the_quantile_function(law: Law) -> None:
    values = np.array([law.quantile(u) for u in MIDDLE])
    assert law.mean == pytest.approx(values.mean(), rel=2e-3)
    assert np.all(np.diff(values) >= 0)


def test_a_floored_and_a_redrawn_normal_are_those_of_scipy() -> None:
    from scipy.stats import norm, truncnorm

    floored, redrawn = Normal(1.0, 2.0, 0.5), Normal(1.0, 2.0, 0.5, "redraw")
    for u in (0.001, 0.2, 0.5, 0.9, 0.9999):
        assert floored.quantile(u) == pytest.approx(max(0.5, norm(1, 2).ppf(u)))
        assert redrawn.quantile(u) == pytest.approx(truncnorm(-0.25, np.inf, 1, 2).ppf(u))


def test_a_clipped_zipf_has_its_probabilities_and_gathers_the_rest_at_its_ends() -> None:
    from scipy.stats import zipf

    law, exact = Zipf(1.2, 16, 180), zipf(1.2)
    drawn = Counter(law.quantile(u) for u in MIDDLE)
    assert set(drawn) == set(range(16, 181))
    for k, expected in ((16, exact.cdf(16)), (17, exact.pmf(17)), (40, exact.pmf(40)), (180, exact.sf(179))):
        assert drawn[k] / len(MIDDLE) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("law", [Zipf(1.2, 16, 180), Trace("pai_job4", 3.0), Values((1.0, 4.0, 4.0, 9.0))], ids=str)
@pytest.mark.parametrize("n", [1, 10, 100])
def test_the_largest_of_n_of_finitely_many_values_is_exact(law: Law, n: int) -> None:
    """E[max] = ∫ (1 − F(t)ⁿ) dt, here a sum over the steps of F; and by midpoints of the quantile function."""
    exact = expected_order_statistic(law, n, n)
    sample = np.sort([law.quantile(u) for u in MIDDLE])
    below = (np.arange(len(sample) + 1) / len(sample)) ** n
    assert exact == pytest.approx(float(sample @ np.diff(below)), rel=1e-3)
    if n == 1:
        assert exact == pytest.approx(law.mean)


# -- tiers -----------------------------------------------------------------------------------------------------


@given(shares=st.lists(st.integers(1, 50), min_size=1, max_size=6), total=st.integers(0, 1000))
def test_counts_add_up_and_no_group_is_off_by_one(shares: list[int], total: int) -> None:
    found = counts(shares, total)
    assert sum(found) == total
    assert all(abs(number - share / sum(shares) * total) < 1 for number, share in zip(found, shares, strict=True))


@given(numbers=st.lists(st.integers(0, 30), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_clients_are_dealt_in_exact_numbers_and_every_seed_the_same(numbers: list[int], seed: int) -> None:
    first, again = (dealt(numbers, Stream(seed, "tier")) for _ in range(2))
    assert [first.count(group) for group in range(len(numbers))] == numbers
    assert first == again


def test_who_is_in_a_tier_is_a_matter_of_luck_and_of_the_seed() -> None:
    shares = {seed: dealt([500, 500], Stream(seed, "tier")) for seed in (0, 1)}
    assert shares[0] != shares[1]
    front = sum(shares[0][:500])  # hypergeometric: 250 ± 11
    assert 205 < front < 295


TIERS = (
    Tier("fast", 0.25, duration_s=Constant(1.0), uplink_bytes_per_second=Constant(1e6)),
    Tier("slow", 0.75, slowness=Uniform(2.0, 3.0), seconds_per_sample=Constant(0.5)),
)


def test_a_tier_has_its_own_laws_and_the_populations_where_it_has_none() -> None:
    population = Population(
        100,
        Constant(10.0),
        samples=Constant(4),
        uplink_bytes_per_second=Constant(1e3),
        model_bytes=1000,
        tiers=TIERS,
    )
    clients = Clients(population, 5)
    assert clients.tier_of is not None
    assert [clients.tier_of.count(0), clients.tier_of.count(1)] == [25, 75]
    for client, tier in enumerate(clients.tier_of):
        slowness = clients.slowness[client]
        if tier == 0:
            assert clients.work_s(client, 0, 0) == pytest.approx(1.0 + 1e-3)
        else:
            assert 2 <= slowness <= 3
            assert clients.work_s(client, 0, 0) == pytest.approx(slowness * (10.0 + 0.5 * 4) + 1.0)
        assert clients.mean_work_s(client) == pytest.approx(clients.work_s(client, 0, 0))
    assert clients.law is None


def test_equal_tiers_are_no_tiers() -> None:
    plain = Population(30, Exponential(5.0), slowness=Lognormal(1.0, 0.5))
    split = Population(
        30,
        Exponential(5.0),
        slowness=Lognormal(1.0, 0.5),
        tiers=(Tier("a", 0.5), Tier("b", 0.5, slowness=Lognormal(1.0, 0.5))),
    )
    ends = [simulate(fedasync(concurrency=4), p, seed=1, updates=50).summary["time_s"] for p in (plain, split)]
    assert ends[0] == ends[1]


def test_phones_are_as_fast_as_flash_measured_them() -> None:
    """FEMNIST: 1642, 588 and 179 ms a batch of 10; the fast ones are 159 of 35,407."""
    clients = Clients(Population(35_407, samples=Constant(10), tier_preset="flash_femnist"), 0)
    assert clients.tier_of is not None
    times = np.array(clients.fixed_s)
    tier = np.array(clients.tier_of)
    assert [int((tier == k).sum()) for k in range(3)] == [18820, 16428, 159]
    for k, (mean, sd) in enumerate(((1.642, 0.0995), (0.588, 0.0239), (0.179, 0.0023))):
        own = times[tier == k]
        assert abs(own.mean() - mean) < 4 * sd / np.sqrt(len(own))
        assert own.std() == pytest.approx(sd, rel=0.2)
    assert [round(each.share or 0, 3) for each in preset("flash_reddit")] == [0.532, 0.464, 0.004]


# -- speed and data --------------------------------------------------------------------------------------------


def spread(correlation: float, **keys: Any) -> Population:
    base: dict[str, Any] = {
        "clients": 2000,
        "seconds_per_sample": Lognormal(0.1, 0.5),
        "slowness": Uniform(1.0, 4.0),
        "samples": Lognormal(100.0, 1.0),
    }
    return Population(slowness_samples_correlation=correlation, **{**base, **keys})


def time_a_sample(clients: Clients) -> np.ndarray:
    return np.array(clients.fixed_s) / np.array(clients.samples)


@pytest.mark.parametrize("correlation", [-1.0, -0.6, 0.0, 0.3, 0.9, 1.0])
def test_the_rank_correlation_of_time_a_sample_and_samples_is_as_asked_for(correlation: float) -> None:
    """The standard error of Spearman's ρ at 2000 clients is at most 0.023."""
    clients = Clients(spread(correlation), 4)
    found = spearmanr(time_a_sample(clients), clients.samples).statistic
    assert found == pytest.approx(correlation, abs=0.07 if abs(correlation) < 1 else 1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_at_the_ends_the_slowest_has_most_data_or_least(sign: int) -> None:
    clients = Clients(spread(float(sign)), 1)
    by_samples = np.argsort(clients.samples)
    assert np.all(sign * np.diff(time_a_sample(clients)[by_samples]) >= -1e-12)


def test_whatever_the_correlation_the_devices_and_the_samples_are_the_same() -> None:
    """As sets, exactly: only who holds which device changes."""
    tiers = (Tier("a", 0.3, slowness=Constant(9.0)), Tier("b", 0.7))
    worlds = [Clients(spread(c, tiers=tiers, samples=Zipf(1.5, 1, 300)), 2) for c in (0.0, -1.0, 0.5)]
    free = worlds[0]
    for tied in worlds[1:]:
        assert sorted(tied.slowness) == sorted(free.slowness)
        assert list(tied.samples) == list(free.samples)
        assert free.tier_of is not None
        assert tied.tier_of is not None
        assert sorted(zip(tied.tier_of, tied.slowness, strict=True)) == sorted(
            zip(free.tier_of, free.slowness, strict=True)
        )


def test_without_a_correlation_nothing_is_dealt_anew() -> None:
    free = Clients(spread(0.0), 3)
    uniform = Stream(3, "slowness").uniform
    assert list(free.slowness) == [1.0 + 3.0 * uniform(client) for client in range(2000)]
    assert kstest(np.array(free.slowness), "uniform", args=(1.0, 3.0)).pvalue > 1e-3
    assert abs(spearmanr(time_a_sample(free), free.samples).statistic) < 0.08


@settings(max_examples=30, deadline=None)
@given(
    samples=st.lists(st.integers(1, 9), min_size=2, max_size=30).filter(lambda n: len(set(n)) > 1),
    sign=st.sampled_from([1.0, -1.0]),
    seed=st.integers(0, 999),
)
def test_a_workloads_own_samples_tie_as_well(samples: list[int], sign: float, seed: int) -> None:
    population = Population(slowness=Lognormal(1.0, 1.0), duration_s=Constant(1.0), slowness_samples_correlation=sign)
    clients = Clients(population, seed, samples)
    slowest_with: dict[int, float] = {}
    for n, slowness in zip(samples, clients.slowness, strict=True):
        slowest_with[n] = max(slowest_with.get(n, 0.0), slowness)
    least: dict[int, float] = {}
    for n, slowness in zip(samples, clients.slowness, strict=True):
        least[n] = min(least.get(n, np.inf), slowness)
    sizes = sorted(least, reverse=sign < 0)
    assert all(slowest_with[a] <= least[b] for a, b in pairwise(sizes))


# -- recorded capacities ---------------------------------------------------------------------------------------


@pytest.fixture
def capacity(tmp_path: Path) -> Path:
    file = tmp_path / "capacity.csv"
    file.write_text("client,computation,communication\n0,100,8000\n1,50.5,1000\n2,10,64\n")
    return file


def test_a_recorded_client_takes_fedscales_time(capacity: Path) -> None:
    """3 × batch × steps × ms/1000, and (down + up) in kbit of 1024 over kbit/s; rows begin again when they run out."""
    population = Population(5, capacity=Capacity(str(capacity), batch_size=20, local_steps=30), model_bytes=1024**2)
    clients = Clients(population, 0)
    kbit = 1024**2 / 1024 * 8
    expected = [3 * 20 * 30 * ms / 1000 + 2 * kbit / kbps for ms, kbps in ((100, 8000), (50.5, 1000), (10, 64))]
    assert list(clients.fixed_s) == pytest.approx([*expected, *expected[:2]])
    assert Clients(Population(capacity=population.capacity, model_bytes=1), 0).count == 3


def test_parquet_says_the_same_as_csv(capacity: Path) -> None:
    import polars as pl

    parquet = capacity.with_suffix(".parquet")
    pl.read_csv(capacity).write_parquet(parquet)
    both = [
        Clients(Population(3, capacity=Capacity(str(file), 1, 1), model_bytes=10), 0).fixed_s
        for file in (capacity, parquet)
    ]
    assert both[0] == both[1]


def test_recorded_devices_are_dealt_by_data_as_others_are(capacity: Path) -> None:
    population = Population(
        capacity=Capacity(str(capacity), 1, 1),
        slowness_samples_correlation=1.0,
        model_bytes=1,
        samples=Values((3, 1, 2)),
    )
    clients = Clients(population, 0)
    assert [round(t, 4) for t in np.array(clients.fixed_s) - 2 / np.array(clients.bandwidth("uplink"))] == [
        0.3,
        0.03,
        0.1515,
    ]


# -- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"tiers": (Tier("a", 0.5), Tier("b", 0.4))}, "tiers: shares must add up to 1, got 0.5 \\+ 0.4 = 0.9"),
        ({"tiers": (Tier("a", 0.5), Tier("a", 0.5))}, "tiers: two are called 'a'"),
        ({"tiers": (Tier("a", 0.5), Tier("b", count=4))}, "some have a share and others a count"),
        ({"tiers": (Tier("a", count=3), Tier("b", count=4))}, "counts add up to 7 for 9 clients"),
        ({"tiers": (Tier("a", 1.0),), "tier_preset": "flash_reddit"}, "give either tiers or tier_preset"),
        ({"tier_preset": "flash"}, "tier_preset must be 'flash_femnist' or"),
        ({"slowness_samples_correlation": 1.5}, "slowness_samples_correlation must be a finite number ≥ -1 and ≤ 1"),
        ({"slowness_samples_correlation": 0.5}, "correlation = 0.5 needs clients of different speed, and all take"),
        (
            {"slowness_samples_correlation": 0.5, "slowness": Uniform(1, 2)},
            "needs clients with different numbers of samples",
        ),
        (
            {"slowness_samples_correlation": 0.5, "slowness": Values((1.0,) * 9), "samples": Zipf(2, 1, 9)},
            "slowness lists who is how fast",
        ),
        ({"server_uplink_bytes_per_second": 0.0}, "server_uplink_bytes_per_second must be a finite number > 0"),
        ({"server_uplink_bytes_per_second": 1.0}, "a network needs model_bytes"),
        ({"duration_s": Values((1.0,) * 9), "tiers": (Tier("a", 1.0, duration_s=Constant(1)),)}, "do not go together"),
    ],
)
def test_populations_that_make_no_sense_are_refused(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Clients(Population(**{"clients": 9, "duration_s": Constant(1.0), **keys}), 0)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Tier("a"), "tier 'a': give either share or count"),
        (lambda: Tier("a", 0.5, 3), "tier 'a': give either share or count"),
        (lambda: Tier("a", 0.5, slowness=Values((1.0,))), "tier 'a': slowness: a list of values says nothing"),
        (lambda: Population(3, tiers=(Tier("a", 1.0),)), "clients of tier 'a' take no time"),
        (lambda: Normal(-10.0, 1.0), "lies 10 sd below minimum"),
        (lambda: Normal(1.0, 1.0, below="drop"), "below must be 'floor' or 'redraw'"),  # type: ignore[arg-type]
        (lambda: Zipf(1.0, 1, 9), "zipf: a must be > 1"),
        (lambda: Zipf(1.5, 9, 8), "zipf: maximum must be an integer ≥ 9"),
        (lambda: Capacity("nowhere.csv", 1, 1), "capacity: nowhere.csv cannot be read: No such file"),
        (lambda: Capacity("x.csv", 0, 1), "capacity: batch_size must be an integer ≥ 1"),
    ],
)
def test_parts_that_make_no_sense_are_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\x80\x04\x95", "is a pickle, which can run code when it is read; the script in docs/populations.md"),
        (b"(dp0\n", "is a pickle"),
        (b"computation,speed\n1,2\n", "has no column 'communication'; it has computation, speed, and needs"),
        (b"computation,communication\n", "has no rows"),
        (b"computation,communication\n1,fast\n", "column 'communication' does not hold numbers alone"),
        (b"computation,communication\n1,2\n3,0\n", "row 2, column 'communication': got 0.0; a finite number > 0"),
        (b"computation,communication\n1,2\n3,\n", "row 2, column 'communication': got None"),
        (b"PAR1 and nothing more", "is neither CSV nor Parquet"),
        (b"", "is neither CSV nor Parquet"),
    ],
)
def test_files_of_capacities_that_cannot_be_read_are_refused(tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "capacity"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=told) as error:
        Capacity(str(file), 1, 1)
    assert "\n" not in str(error.value)


def test_an_empirical_law_and_an_on_off_one_go_with_tiers(tmp_path: Path) -> None:
    file = tmp_path / "phones.csv"
    file.write_text("ms\n100\n200\n")
    tiers = (
        Tier("phones", 0.5, duration_s=Empirical(str(file), "ms", 1e-3)),
        Tier("rest", 0.5, duration_s=Exponential(1.0)),
    )
    run = simulate(fedasync(concurrency=3), Population(10, tiers=tiers, availability=OnOff()), updates=30)
    assert run.summary["consumed"] == 30


def test_the_script_of_the_page_converts_fedscales_pickles(tmp_path: Path) -> None:
    """Run as a user would, on pickles made here."""
    page = (Path(__file__).parents[2] / "docs" / "populations.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "convert.py").write_text(script)
    capacity = {1: {"computation": 100.0, "communication": 8000.0}, 2: {"computation": 5.0, "communication": 64.0}}
    behaviour = {1: {"duration": 90, "inactive": [30, 80], "active": [10, 50], "finish_time": 100, "model": "x"}}
    for kind, content in (("capacity", capacity), ("behaviour", behaviour)):
        (tmp_path / kind).write_bytes(pickle.dumps(content))
        words = [sys.executable, "convert.py", kind, kind, f"{kind}.csv"]
        subprocess.run(words, cwd=tmp_path, check=True)
    population = Population(
        capacity=Capacity(str(tmp_path / "capacity.csv"), 2, 5),
        availability=AvailabilityFile(str(tmp_path / "behaviour.csv")),
        model_bytes=1024,
    )
    clients = Clients(population, 0)
    assert list(clients.fixed_s) == pytest.approx([3.0 + 16 / 8000, 0.15 + 16 / 64])
    assert clients.presence is not None
    assert [clients.presence(1, t) for t in (20.0, 40.0, 155.0)] == [(True, 30.0), (False, 50.0), (True, 180.0)]
