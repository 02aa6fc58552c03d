"""What is seen of a population before any run: its numbers against the laws, and its figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from fedasync.report.world import World, look
from fedasync.report.world_figures import TIMES_S, figures
from fedasync.simulation.availability import Daily, Intervals
from fedasync.simulation.devices import Tier
from fedasync.simulation.laws import Constant, Exponential, Lognormal, Uniform, Zipf
from fedasync.simulation.outages import OutageTimes
from fedasync.simulation.population import Clients, Population


def seen(seeds: int = 1, horizon_s: float = 1000.0, **keys: Any) -> World:
    population = Population(**{"clients": 400, "duration_s": Exponential(10.0), **keys})
    return look("a world", {seed: Clients(population, seed) for seed in range(seeds)}, horizon_s)


def harmonic(n: int) -> float:
    return sum(1 / k for k in range(1, n + 1))


def test_durations_are_those_of_the_law() -> None:
    """Four standard errors: of the mean, and of the share that is done by the median."""
    (tier,) = seen(seeds=2).tiers
    n = len(tier.durations_s)
    assert n >= 8000
    assert abs(tier.durations_s.mean() - 10.0) < 4 * 10.0 / np.sqrt(n)
    assert abs((tier.durations_s < 10 * np.log(2)).mean() - 0.5) < 4 * 0.5 / np.sqrt(n)
    assert np.all(np.diff(tier.durations_s) >= 0)


@pytest.mark.parametrize("n", [10, 100])
def test_ceilings_are_exact_for_one_law_and_drawn_for_a_mixture_of_the_same(n: int) -> None:
    """H_n for an exponential law; two equal tiers must say the same, within what 8000 draws tell of a tail."""
    halves = (Tier("a", 0.5, duration_s=Exponential(10.0)), Tier("b", 0.5))
    assert seen().ceilings[n] == pytest.approx(harmonic(n), rel=1e-6)
    assert seen(tiers=halves).ceilings[n] == pytest.approx(harmonic(n), rel=0.08)


def test_a_mixture_of_two_constants_has_its_ceiling_in_closed_form() -> None:
    """1 s for 9 of 10, 10 s for the tenth: E[max of n] = 10 − 9·0.9ⁿ, E[t] = 1.9."""
    tiers = (Tier("quick", 0.9, duration_s=Constant(1.0)), Tier("slow", 0.1, duration_s=Constant(10.0)))
    world = seen(tiers=tiers)
    for n in (10, 100):
        assert world.ceilings[n] == pytest.approx((10 - 9 * 0.9**n) / 1.9)
    assert [(tier.name, tier.clients, tier.share) for tier in world.tiers] == [("quick", 360, 0.9), ("slow", 40, 0.1)]


def test_who_is_online_is_what_the_calendar_says() -> None:
    times = tuple(((0.0, 250.0),) if client % 2 else ((0.0, 750.0),) for client in range(400))
    world = seen(availability=Intervals(times), outages=OutageTimes((((600.0, 700.0),), ())))
    share = dict(zip(world.moments_s, world.tiers[0].online, strict=True))
    at = [min(share, key=lambda t: abs(t - wanted)) for wanted in (100.0, 400.0, 650.0, 900.0)]
    assert [share[t] for t in at][:2] == [1.0, 0.5]
    assert share[at[3]] == 0.0
    dark, lit = world.regions[:, list(share).index(at[2])]
    assert dark == 0.0
    assert lit == pytest.approx(0.5, abs=0.15)
    assert share[at[2]] == pytest.approx(lit / 2, abs=0.01)


def test_bandwidths_are_the_tiers_own_and_none_where_there_is_no_limit() -> None:
    tiers = (Tier("wired", 0.5), Tier("mobile", 0.5, uplink_bytes_per_second=Uniform(1e5, 2e5)))
    wired, mobile = seen(tiers=tiers, model_bytes=1000).tiers
    assert wired.uplink is None
    assert wired.downlink is None
    assert mobile.uplink is not None
    assert len(mobile.uplink) == 200
    assert 1e5 <= mobile.uplink[0] <= mobile.uplink[-1] <= 2e5


def drawn_texts(figure: Figure) -> list[tuple[Text, Any]]:
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    found = []
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if text.get_visible() and text.get_text().strip():
            found.append((text, text.get_window_extent(renderer)))
    return found


def ticks(axis: Any) -> list[Any]:
    """Extents of the tick labels inside the axis's limits."""
    low, high = sorted(axis.get_view_interval())
    return [
        tick.label1.get_window_extent()
        for tick in axis.get_major_ticks()
        if low <= tick.get_loc() <= high and tick.label1.get_text() and tick.label1.get_visible()
    ]


WORLDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "constant": {"duration_s": Constant(3.0)},
    "heavy": {"duration_s": Lognormal(1e4, 2.0)},
    "milliseconds": {"duration_s": Uniform(0.002, 0.004)},
    "everything": {
        "duration_s": None,
        "samples": Zipf(1.4, 5, 400),
        "slowness_samples_correlation": 0.7,
        "availability": Daily(day_s=1000.0, turnover_s=50.0),
        "outages": OutageTimes((((100.0, 300.0),), (), ((0.0, 20.0), (500.0, 501.0)))),
        "downlink_bytes_per_second": Lognormal(5e6, 0.5),
        "model_bytes": 10**7,
        "server_uplink_bytes_per_second": 1e8,
        "tiers": (
            Tier("a phone with a rather long name", 0.3, seconds_per_sample=Lognormal(0.02, 0.3)),
            Tier("old", 0.7, seconds_per_sample=Lognormal(0.3, 0.5), uplink_bytes_per_second=Uniform(1e5, 9e5)),
        ),
    },
}


@pytest.mark.parametrize("name", WORLDS)
def test_figures_show_what_there_is_and_no_labels_overlap(name: str) -> None:
    found = figures(seen(seeds=2, **WORLDS[name]), "fedasync world study.toml")
    expected = {"durations"} if name != "everything" else {"durations", "speed_and_data", "online", "bandwidth"}
    assert set(found) == expected
    for figure in found.values():
        figure.canvas.draw()
        box = figure.bbox
        for text, extent in drawn_texts(figure):
            if text.get_window_extent().width and text.axes is None:
                assert extent.x1 <= box.x1 + 1, text.get_text()
                assert extent.y0 >= box.y0 - 1, text.get_text()
        for ax in figure.axes:
            for axis in (ax.xaxis, ax.yaxis):
                labels = ticks(axis)
                assert len(labels) >= 2 or axis is figure.axes[-1].yaxis
                assert not any(a.overlaps(b) for i, a in enumerate(labels) for b in labels[i + 1 :])


def test_ticks_of_time_rise() -> None:
    assert list(TIMES_S.values()) == sorted(TIMES_S.values())
