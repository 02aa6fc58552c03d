"""Federated PPO from a study file: built, refused, run, and the same under Flower."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fedasync as fa
from fedasync.federated.limits import Limits
from fedasync.rl.federated_ppo import FederatedPpo
from fedasync.rl.tasks.reverse import Reverse
from fedasync.simulation import Clients
from fedasync.simulation.laws import Exponential
from fedasync.studies.build import Parts, build, build_workload, build_world
from fedasync.studies.errors import StudyError
from fedasync.studies.study import load

from ..simulation.rows import row
from .running import Command, changed, runs, summary

STUDY = """
[study]
title = "small, federated"
seeds = 1

[run]
updates = 4
evaluate_every_s = 10
training = "one_by_one"

[population]
duration_s = { kind = "exponential", mean = 10.0 }

[workload]
kind = "federated_ppo"
clients = 3
prompts_per_client = 4
batch = 2
answers = 2
local_steps = 2
rollouts_every = 2
evaluation_prompts = 8

[workload.task]
kind = "reverse"
length = 2
symbols = 4
held_out = 8

[workload.policy]
kind = "gpt2"
hidden = 8
layers = 1
heads = 2
context_tokens = 12

[workload.sampling]
max_new_tokens = 4

[workload.objective]
loss = "tis"

[workload.optimiser]
learning_rate = 1e-3

[targets]
exact = 0.95

[[axis]]
name = "strategy"
points = [
  { label = "FedAvg", strategy = { name = "fedavg", cohort = 2 } },
  { label = "FedFa", strategy = { name = "fedfa", concurrency = 2, window = 2 } },
]

[report]
figures = ["metric_over_time"]
metric = "reward"
"""


def table(folder: Path, *changes: tuple[str, str]) -> dict[str, Any]:
    """The configuration of the study's first run."""
    (folder / "s.toml").write_text(changed(STUDY, *changes))
    return next(iter(load(folder / "s.toml").plans())).config


def made(config: dict[str, Any]) -> FederatedPpo:
    make = build_workload(config, "s.toml")
    assert make is not None
    workload = make()
    assert isinstance(workload, FederatedPpo)
    return workload


def test_the_tables_are_the_problem(tmp_path: Path) -> None:
    workload = made(table(tmp_path))
    assert workload.problem.environment == Reverse(2, 4, held_out=8)
    assert workload.problem.objective.loss == "tis"
    assert workload.client_samples() == [4, 4, 4]
    assert (workload.batch, workload.answers, workload.local_steps, workload.rollouts_every) == (2, 2, 2, 2)


def test_clients_may_have_keys_of_the_task_otherwise(tmp_path: Path) -> None:
    own = "[workload]\nclient_tasks = [{ symbols = 3 }, { length = [2, 3] }]"
    config = table(tmp_path, ("[workload]", own), ("prompts_per_client = 4", "prompts_per_client = [1, 2, 3]"))
    workload = made(config)
    tasks = [Reverse(2, 3, held_out=8), Reverse([2, 3], 4, held_out=8)]
    assert workload._environments == [tasks[0], tasks[1], tasks[0]]
    assert workload._first == [0, 0, 1]
    assert workload.problem.environment == Reverse(2, 4, held_out=8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('kind = "reverse"', 'kind = "revers"'), "s.toml: workload: task.kind: unknown name 'revers'; did you mean"),
        (("symbols = 4", "symbol = 4"), "s.toml: workload: task.symbol: unknown key; did you mean 'symbols'?"),
        (('kind = "gpt2"', 'kind = "mlp"\n#'), "s.toml: workload: policy.heads: unknown key"),
        (('loss = "tis"', 'loss = "tis"\nkl_coefficient = 0.1'), "s.toml: workload: federated_ppo: objective.kl_coeff"),
        (('loss = "tis"', 'loss = "tiss"'), 's.toml: workload: objective.loss: got "tiss"'),
        (
            ("local_steps = 2", "local_step = 2"),
            "s.toml: workload.local_step: unknown key; did you mean 'local_steps'?",
        ),
        (("local_steps = 2", "local_steps = 0"), "s.toml: workload: federated_ppo: local_steps must be an integer ≥ 1"),
        (("[workload.sampling]\nmax_new_tokens = 4\n", ""), "s.toml: workload.sampling: this key is missing"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_place(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    with pytest.raises(StudyError) as refused:
        made(table(tmp_path, change))
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


def test_a_task_of_ones_own_counts_as_what_the_run_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_task.py").write_text(
        "from fedasync.rl.tasks import Reverse as Own\n\n\ndef task(**k):\n    return Own(**k)\n"
    )
    config = table(tmp_path, ('kind = "reverse"', 'kind = "own_task.task"'))
    assert "own_task" in {getattr(each, "__module__", None) for each in build_world(config, "s.toml").sources}


def test_a_study_runs_and_evaluates(fedasync: Command, study: Path) -> None:
    study.write_text(STUDY)
    end = fedasync("sim", "s.toml")
    assert (end.status, end.err) == (0, ""), end.err
    found = {name.partition("_")[0]: summary(run) for name, run in runs(Path("results/s")).items()}
    assert found.keys() == {"fedavg", "fedfa"}
    for each in found.values():
        assert each["final"].keys() == {"reward", "exact"}
        assert each["consumed"] >= 4
        assert all(verdict["holds"] for verdict in each["verdicts"])
    assert fedasync("sim", "s.toml").status == 0


def test_to_build_a_study_with_it_takes_no_torch(tmp_path: Path) -> None:
    table(tmp_path)
    program = (
        "import sys; from pathlib import Path; from fedasync.studies.build import build; "
        "from fedasync.studies.study import load; "
        "build(next(iter(load(Path('s.toml')).plans())).config, 's'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", ["fedbuff", "fedfa"])
def test_under_flower_it_is_the_simulation_to_the_last_bit(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients and server each with a workload of their own, made from the configuration that Flower carries."""
    identity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    for field in ("_run_id", "_node_id", "_task_id"):  # ``Message(...)`` works only where these are known
        monkeypatch.setattr(identity, field, 1)
    from fedasync.flower.configuration import flatten, unflatten
    from fedasync.flower.serving import Deployment, serve
    from fedasync.flower.settings import DeploymentSettings, with_deadline

    from ..flower.fake_grid import FakeGrid, VirtualClock

    config = unflatten(flatten(table(tmp_path)))
    strategy = row(name, concurrency=2, **({"buffer_size": 2} if name == "fedbuff" else {"window": 2}))
    population, limits = fa.Population(3, Exponential(10.0)), Limits(updates=6, evaluate_every_s=10.0)
    at_server, at_clients, simulated = (made(config) for _ in range(3))
    clients = Clients(population, 3, at_server.client_samples())
    clock = VirtualClock()
    grid = FakeGrid(at_clients, clock, lambda client, turn, lease, steps: clients.lease_s(client, turn, lease, 1.0))
    settings = DeploymentSettings(profile_s=[clients.mean_work_s(client) for client in range(3)])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a client of a deployment and a simulation have it
    try:
        deployed = serve(grid, Deployment(strategy, at_server, limits, settings, 3), clock)
    finally:
        torch.set_num_threads(threads)
    run = fa.simulate(
        with_deadline(strategy, settings),
        population,
        simulated,
        seed=3,
        updates=6,
        evaluate_every_s=10.0,
        training="one_by_one",
        cancelled_clients="finish",
    )
    assert deployed.events.equals(run.events)
    assert deployed.metrics.equals(run.metrics)
    assert deployed.model is not None
    assert run.model is not None
    assert torch.equal(deployed.model.values, run.model.values)
    assert not torch.equal(run.model.values, simulated.initial_model(3).values)


def test_the_page_runs_as_it_stands(fedasync: Command, study: Path) -> None:
    """A task of one's own in four clients; the table at its beginning can be read."""
    page = (Path(__file__).parents[2] / "docs" / "federated-rl.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    first, own = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    Path("vowels.py").write_text(code)
    head, _, rest = STUDY.partition("[workload]")
    study.write_text(head + first + "[[axis]]" + rest.partition("[[axis]]")[2])
    assert made(next(iter(load(study).plans())).config).client_samples() == [64] * 8
    study.write_text(head + own + "[[axis]]" + rest.partition("[[axis]]")[2])
    assert fedasync("sim", "s.toml").status == 0
    assert all(summary(run)["final"]["reward"] > 0 for run in runs(Path("results/s")).values())


def test_the_shipped_study_can_be_built() -> None:
    plans = list(load(Path(__file__).parents[2] / "sims" / "federated_ppo.toml").plans())
    assert len(plans) == 3 * 5
    for plan in plans:
        assert made(plan.config).client_samples() == [64] * 8
        assert isinstance(build(plan.config, "here"), Parts)


def test_plain_steps_serve_the_rows_that_divide_by_them(fedasync: Command, study: Path) -> None:
    """SCAFFOLD and FedNova learn how far a client's steps reach, which only gradients that nobody clips tell."""
    points = (
        '  { label = "FedAvg", strategy = { name = "fedavg", cohort = 2 } },\n'
        '  { label = "FedFa", strategy = { name = "fedfa", concurrency = 2, window = 2 } },\n'
    )
    rows = (
        '  { label = "SCAFFOLD", strategy = { name = "scaffold", cohort = 2 } },\n'
        '  { label = "FedNova", strategy = { name = "fednova", cohort = 2 } },\n'
    )
    plain = ("learning_rate = 1e-3", 'learning_rate = 1e-3\nkind = "sgd"\nclip_norm = "none"')
    study.write_text(changed(STUDY, (points, rows), plain))
    end = fedasync("sim", "s.toml")
    assert (end.status, end.err) == (0, ""), end.err
    study.write_text(changed(STUDY, (points, rows)))
    end = fedasync("sim", "s.toml", "--out", "clipped")
    assert end.status == 1
    assert "step_size_sum" in end.err or "clip_norm" in end.err, end.err
