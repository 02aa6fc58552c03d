"""The oracle against its closed forms."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedasync.aggregation.model import Model
from fedasync.workloads import Quadratic, Task, Workload

reals = st.floats(-10, 10)
rates = st.floats(0, 1)


def at(workload: Quadratic, w: float) -> Model:
    model = workload.initial_model(0)
    return Model(torch.full_like(model.values, w), model.layout)


def mapped(workload: Quadratic, client: int, w: float, mu: float = 0.0) -> np.ndarray:
    values: np.ndarray = workload.train(Task(client, at(workload, w), 0, mu)).values.numpy()
    return values


def test_the_golden_map_is_exact() -> None:
    workload = Quadratic(3, centres=(0.0, 4.0, 8.0), start=16.0)
    assert workload.initial_model(5).values.tolist() == [16.0]
    assert [mapped(workload, i, 16.0).item() for i in range(3)] == [8.0, 10.0, 12.0]
    assert mapped(workload, 1, 8.0).item() == 6.0
    assert mapped(workload, 2, 6.25).item() == 7.125
    assert workload.evaluate(at(workload, 16.0)) == {
        "w": 16.0,
        "distance": 12.0,
        "loss": pytest.approx((16**2 + 12**2 + 8**2) / 6, rel=1e-15),
    }


@given(centre=reals, rho=st.floats(0, 0.9), drift=reals)
def test_the_fixed_point_of_a_client(centre: float, rho: float, drift: float) -> None:
    workload = Quadratic(1, (centre,), contraction=rho, drift=drift)
    point = centre + drift / (1 - rho)
    assert mapped(workload, 0, point) == pytest.approx(point, abs=1e-12, rel=1e-12)


@given(centre=reals, rho=rates, drift=reals, v=reals, w=reals, mu=st.floats(0, 5))
def test_two_models_come_closer_by_the_contraction(
    centre: float, rho: float, drift: float, v: float, w: float, mu: float
) -> None:
    workload = Quadratic(1, (centre,), contraction=rho, drift=drift)
    gap = mapped(workload, 0, v) - mapped(workload, 0, w)
    assert gap == pytest.approx(rho * (v - w), abs=1e-12)
    # With the proximal term the base itself holds on: m moves with w by μ/(1 + μ).
    gap = mapped(workload, 0, v, mu) - mapped(workload, 0, w, mu)
    assert gap == pytest.approx((mu + rho ** (1 + mu)) / (1 + mu) * (v - w), abs=1e-11)


@given(rho=rates, w=reals, drift=reals)
def test_drift_adds_to_every_coordinate(rho: float, w: float, drift: float) -> None:
    still = Quadratic(1, dimensions=3, contraction=rho, seed=1)
    drifting = Quadratic(1, dimensions=3, contraction=rho, seed=1, drift=drift)
    assert np.allclose(mapped(drifting, 0, w) - mapped(still, 0, w), drift, atol=1e-12)


@pytest.mark.parametrize("mu", [0.0, 0.1, 1.0, 3.0])
def test_the_map_is_gradient_flow_on_the_proximal_objective(mu: float) -> None:
    centre, w, rho = 3.0, -2.0, 0.3
    steps = 100_000
    dt = -np.log(rho) / steps
    x = w
    for _ in range(steps):
        x -= dt * ((x - centre) + mu * (x - w))
    assert mapped(Quadratic(1, (centre,), contraction=rho), 0, w, mu) == pytest.approx(x, abs=1e-4)


def test_contraction_zero_minimises_exactly_and_one_does_nothing() -> None:
    exact = Quadratic(1, (3.0,), contraction=0.0)
    assert mapped(exact, 0, 7.0).item() == 3.0
    assert mapped(exact, 0, 7.0, mu=1.0).item() == 5.0
    assert mapped(Quadratic(1, (3.0,), contraction=1.0, drift=0.5), 0, 7.0).item() == 7.5


def test_federated_averaging_contracts_to_the_weighted_mean() -> None:
    centres, counts, rho, drift = (0.0, 4.0, 10.0), (1, 2, 5), 0.5, 0.25
    workload = Quadratic(3, centres, contraction=rho, drift=drift, start=9.0, samples=counts)
    target = np.dot(centres, counts) / 8 + drift / (1 - rho)
    w = 9.0
    for _ in range(10):
        following = sum(n / 8 * mapped(workload, i, w).item() for i, n in enumerate(counts))
        assert following - target == pytest.approx(rho * (w - target), abs=1e-12)
        w = following


@given(
    clients=st.integers(1, 6), dimensions=st.integers(1, 5), spread=st.floats(0, 3), w=reals, seed=st.integers(0, 99)
)
def test_metrics_by_their_definition(clients: int, dimensions: int, spread: float, w: float, seed: int) -> None:
    workload = Quadratic(clients, centre_spread=spread, dimensions=dimensions, seed=seed)
    metrics = workload.evaluate(at(workload, w))
    c = workload.centres
    assert metrics["w"] == pytest.approx(w)
    assert metrics["distance"] == pytest.approx(np.sqrt(np.mean((w - c.mean(0)) ** 2)), abs=1e-12)
    assert metrics["loss"] == pytest.approx(np.mean([0.5 * np.sum((w - x) ** 2) / dimensions for x in c]))


def test_drawn_centres_are_normal_and_depend_on_the_seed_alone() -> None:
    one, same, other = (Quadratic(2000, centre_spread=3.0, dimensions=2, seed=s).centres for s in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    assert abs(one.mean()) < 0.2
    assert one.std() == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_results_have_the_dtype_and_the_samples_and_their_own_memory(dtype: Any) -> None:
    workload: Workload = Quadratic(2, dimensions=4, dtype=dtype, samples=(3, 8), contraction=1.0)
    assert list(workload.client_samples()) == [3, 8]
    model = workload.initial_model(0)
    before = model.values.clone()
    result = workload.train(Task(1, model, 0))
    assert result.values.dtype == getattr(torch, dtype)
    assert result.samples == 8
    assert result.form == "parameters"
    result.values.zero_().add_(99)
    assert torch.equal(model.values, before)
    assert not (workload.train(Task(1, model, 0)).values == 99).any()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"clients": 0}, "clients must be an integer ≥ 1, got 0"),
        ({"centres": (1.0, 2.0)}, "centres must have one number per client, 3, got 2"),
        ({"centres": (1.0, float("nan"), 2.0)}, r"centres\[1\] must be a finite number, got nan"),
        ({"centre_spread": -1.0}, r"centre_spread must be a finite number ≥ 0, got -1\.0"),
        ({"contraction": 1.5}, r"contraction must be a finite number ≥ 0 and ≤ 1, got 1\.5"),
        ({"drift": float("inf")}, "drift must be a finite number, got inf"),
        ({"start": float("nan")}, "start must be a finite number, got nan"),
        ({"dimensions": 0}, "dimensions must be an integer ≥ 1, got 0"),
        ({"samples": (1, 2)}, "samples must have one number per client, 3, got 2"),
        ({"samples": (1, 0, 2)}, r"samples\[1\] must be an integer ≥ 1, got 0"),
        ({"dtype": "int8"}, "dtype must be 'float32' or 'float64', got 'int8'"),
        ({"seed": -1}, "seed must be an integer ≥ 0, got -1"),
    ],
)
def test_parameters_out_of_range_are_named(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Quadratic: {message}$"):
        Quadratic(**({"clients": 3} | parameters))


def test_a_foreign_model_or_client_is_refused() -> None:
    workload = Quadratic(2, dimensions=3)
    with pytest.raises(ValueError, match=r"must be torch\.float64 of shape \[3\], got torch\.float64 of shape \[1\]"):
        workload.train(Task(0, Quadratic(2).initial_model(0), 0))
    with pytest.raises(ValueError, match=r"shape \[3\], got torch\.float32"):
        workload.train(Task(0, Quadratic(2, dimensions=3, dtype="float32").initial_model(0), 0))
    with pytest.raises(ValueError, match="client must be between 0 and 1, got -1"):
        workload.train(Task(-1, workload.initial_model(0), 0))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(
    tasks=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 2), reals, st.sampled_from([0.0, 0.3, 2.0]), st.booleans()),
        max_size=12,
    ),
    memory=st.sampled_from([0, 500, 2**30]),
)
def test_a_batch_is_to_the_bit_what_the_tasks_bring_alone(
    dtype: Any, tasks: list[tuple[int, int, float, float, bool]], memory: int
) -> None:
    one = Quadratic(3, contraction=0.3, drift=0.1, dimensions=5, samples=(2, 3, 4), dtype=dtype)
    other = Quadratic(4, contraction=0.7, dimensions=5, dtype=dtype, seed=1)
    assert one.batch_key == other.batch_key != Quadratic(3, dimensions=4, dtype=dtype).batch_key
    control = torch.arange(5, dtype=at(one, 0.0).values.dtype)
    work = [
        ((one, other)[which], Task(client, at(one, w), 0, mu, control if controlled else None))
        for which, client, w, mu, controlled in tasks
    ]
    for (owner, task), found in zip(work, one.train_batch(work, memory), strict=True):
        alone = owner.train(task)
        assert found.values.numpy().tobytes() == alone.values.numpy().tobytes()
        assert found.samples == alone.samples
        assert found.values.untyped_storage().nbytes() == found.values.nbytes


def test_a_control_variate_moves_the_centre() -> None:
    workload = Quadratic(1, (2.0,), contraction=0.0)
    task = Task(0, at(workload, 9.0), 0, control=torch.tensor([0.5], dtype=torch.float64))
    assert workload.train(task).values.tolist() == [1.5]
