"""Laws by their quantile functions: mean, range and order; and what they refuse."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import exp, inf, isfinite, log
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.simulation.availability import Intervals, OnOff
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

from .worlds import LAW_NAMES

NAN = float("nan")
SMALLEST, LARGEST = 2.0**-53, 1.0 - 2.0**-53
"""The ends of the stream's open interval."""

positive = st.floats(1e-3, 1e3)
any_law = st.one_of(
    st.builds(Constant, st.floats(0, 1e6)),
    st.builds(Values, st.lists(st.floats(0, 1e6), min_size=1, max_size=9).map(tuple)),
    st.builds(lambda low, width: Uniform(low, low + width), st.floats(0, 1e3), st.floats(0, 1e3)),
    st.builds(Exponential, positive),
    st.builds(ShiftedExponential, st.floats(0, 1e3), positive),
    st.builds(HalfNormal, positive, st.floats(0, 1e3)),
    st.builds(Lognormal, positive, st.floats(0, 5)),
    st.builds(Pareto, positive, st.floats(1.01, 9)),
    st.builds(
        lambda low, alpha, factor: Pareto(low, alpha, low * factor), positive, st.floats(0.1, 3), st.floats(1, 1e4)
    ),
)
inside = st.one_of(st.sampled_from([SMALLEST, LARGEST, 0.5]), st.floats(SMALLEST, LARGEST))


@given(law=any_law, u=inside, v=inside)
def test_quantiles_are_finite_times_that_rise_with_u(law: Law, u: float, v: float) -> None:
    low, high = law.quantile(min(u, v)), law.quantile(max(u, v))
    assert 0 <= low <= high < inf


@pytest.mark.parametrize("law", LAW_NAMES)
def test_the_mean_is_the_integral_of_the_quantile_function(laws: dict[str, Law], law: str) -> None:
    """Midpoints in ln(1 − u), where heavy tails live; the Pareto's last stretch is added by hand."""
    chosen = laws[law]
    edges = np.concatenate([np.linspace(0, 1, 6001)[:-1], 1 - np.exp(np.linspace(log(1 / 6000), log(1e-12), 4000))])
    edges = np.unique(np.clip(edges, 0, 1))
    middles = (edges[:-1] + edges[1:]) / 2
    integral = sum(w * chosen.quantile(u) for w, u in zip(np.diff(edges), middles, strict=True))
    assert integral == pytest.approx(chosen.mean, rel=2e-3)


@pytest.mark.parametrize(
    ("law", "u", "value"),
    [
        (Exponential(2.0), 1 - exp(-1), 2.0),
        (ShiftedExponential(1.0, 2.0), 1 - exp(-1), 3.0),
        (Uniform(1.0, 3.0), 0.25, 1.5),
        (HalfNormal(2.0, 1.0), 0.682689492137, 3.0),
        (Lognormal(1.0, 0.5), 0.5, exp(-0.125)),
        (Pareto(2.0, 2.0), 0.75, 4.0),
        (Pareto(2.0, 2.0, cap=3.0), 0.75, 3.0),
        (Constant(4.0), 0.1, 4.0),
        (Values((3.0, 1.0, 2.0)), 0.5, 2.0),
    ],
    ids=lambda x: getattr(x, "kind", None),
)
def test_quantiles_meet_known_values(law: Law, u: float, value: float) -> None:
    assert law.quantile(u) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(
    ("law", "mean"),
    [
        (Pareto(1.0, 2.0), 2.0),
        (Pareto(1.0, 1.0, cap=exp(1)), 2.0),
        (Pareto(1.0, 2.0, cap=2.0), 1.5),
        (Lognormal(3.0, 2.0), 3.0),
        (HalfNormal(1.0), 0.7978845608),
        (Values((1.0, 2.0, 6.0)), 3.0),
    ],
    ids=str,
)
def test_means_meet_their_closed_forms(law: Law, mean: float) -> None:
    assert law.mean == pytest.approx(mean, rel=1e-9)


def test_an_empirical_law_draws_each_row_alike_and_scales_it(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("ms,device\n300,a\n100,b\n200,c\n100,d\n")
    law = Empirical(str(file), "ms", 1e-3)
    assert [law.quantile(u) for u in (0.1, 0.3, 0.6, 0.9)] == [0.1, 0.1, 0.2, 0.3]
    assert law.mean == pytest.approx(0.175)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "constant below 0": (lambda: Constant(-1.0), "constant: value must be ≥ 0 and finite, got -1.0"),
    "constant nan": (lambda: Constant(NAN), "constant: value must be ≥ 0 and finite, got nan"),
    "no values": (lambda: Values(()), "values: the list is empty; at least one number is needed"),
    "negative value": (lambda: Values((1.0, -2.0)), "values: each entry must be ≥ 0 and finite, got -2.0"),
    "uniform upside down": (lambda: Uniform(2.0, 1.0), "uniform: high must be ≥ 2 and finite, got 1.0"),
    "uniform below 0": (lambda: Uniform(-1.0, 1.0), "uniform: low must be ≥ 0 and finite, got -1.0"),
    "exponential of nothing": (lambda: Exponential(0.0), "exponential: mean must be > 0 and finite, got 0.0"),
    "shifted back": (lambda: ShiftedExponential(-1.0, 1.0), "shifted_exponential: shift must be ≥ 0"),
    "shifted without scale": (lambda: ShiftedExponential(1.0, 0.0), "shifted_exponential: scale must be > 0"),
    "half-normal without spread": (lambda: HalfNormal(0.0), "half_normal: sd must be > 0 and finite, got 0.0"),
    "half-normal below 0": (lambda: HalfNormal(1.0, -0.5), "half_normal: minimum must be ≥ 0 and finite, got -0.5"),
    "lognormal of nothing": (lambda: Lognormal(0.0, 1.0), "lognormal: mean must be > 0 and finite, got 0.0"),
    "lognormal sigma": (lambda: Lognormal(1.0, -1.0), "lognormal: sigma must be ≥ 0 and finite, got -1.0"),
    "pareto minimum": (lambda: Pareto(0.0, 2.0), "pareto: minimum must be > 0 and finite, got 0.0"),
    "pareto alpha": (lambda: Pareto(1.0, 0.0), "pareto: alpha must be > 0 and finite, got 0.0"),
    "pareto without mean": (lambda: Pareto(1.0, 1.0), "alpha > 1, or a cap, would do"),
    "pareto cap": (lambda: Pareto(2.0, 2.0, cap=1.0), "pareto: cap must be ≥ 2 and finite, got 1.0"),
    "never on": (lambda: OnOff(Constant(0.0), Exponential(1.0)), "on_off: on_s and off_s must have means > 0"),
    "overlap": (lambda: Intervals((((0.0, 2.0), (1.0, 3.0)),)), "client 0: [1.0, 3.0]"),
    "backwards": (lambda: Intervals(((), ((3.0, 1.0),))), "client 1: [3.0, 1.0] must have 0 ≤ start < end"),
    "beyond the cycle": (
        lambda: Intervals((((0.0, 25.0),),), cycle_s=24.0),
        "client 0 is online until 25 s, beyond cycle_s = 24.0",
    ),
    "no cycle": (lambda: Intervals(((),), cycle_s=0.0), "cycle_s must be > 0 and finite, got 0.0"),
    "intervals for others": (
        lambda: Intervals(((), ())).presence(3, 0),
        "2 lists of times for 3 clients; one each would do",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_numbers_out_of_range_are_refused_in_one_line(case: str) -> None:
    make, words = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        make()
    assert "\n" not in str(refused.value)


CSV: dict[str, tuple[str | None, str]] = {
    "missing": (None, "cannot be read: No such file or directory"),
    "wrong column": ("a,b\n1,2\n", "has no column 'seconds'; it has a, b"),
    "no rows": ("seconds\n", "has no rows"),
    "nothing at all": ("", "has no column 'seconds'"),
    "negative": ("seconds\n1\n-2\n", "line 3, column 'seconds': '-2' is no number ≥ 0"),
    "text": ("seconds\n1\nfast\n", "line 3, column 'seconds': 'fast' is no number ≥ 0"),
    "infinite": ("seconds\ninf\n", "'inf' is no number ≥ 0"),
    "not a number": ("seconds\nnan\n", "'nan' is no number ≥ 0"),
    "empty cell": ("seconds,b\n1,2\n,3\n", "line 3, column 'seconds': '' is no number ≥ 0"),
    "short row": ("b,seconds\n1,2\n3\n", "line 3, column 'seconds': None is no number ≥ 0"),
}


@pytest.mark.parametrize("case", CSV)
def test_a_file_that_holds_no_durations_is_refused_when_it_is_named(tmp_path: Path, case: str) -> None:
    content, words = CSV[case]
    file = tmp_path / "durations.csv"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        Empirical(str(file), "seconds")
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "durations.csv"
    file.write_bytes(b"seconds\n\xff\xfe\x00\n")
    with pytest.raises(ValueError, match="cannot be read"):
        Empirical(str(file), "seconds")


def test_a_scale_of_0_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "durations.csv"
    file.write_text("seconds\n1\n")
    with pytest.raises(ValueError, match="empirical: scale must be > 0 and finite, got 0"):
        Empirical(str(file), "seconds", 0.0)
    assert isfinite(Empirical(str(file), "seconds").mean)
