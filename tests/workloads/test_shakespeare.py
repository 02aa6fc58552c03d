"""Next characters by role: unequal natural clients, windows of what each says, and its end as the test."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedasync as fa
from fedasync.workloads import LocalTraining, Shakespeare, Task
from fedasync.workloads.characters import decode
from fedasync.workloads.plays import read_roles

LENGTHS = {"ANNA": 700, "BERTA": 1500, "CARL": 400, "DORA": 90}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A play in which any twelve characters occur once, so that a window has one place."""
    path = tmp_path_factory.mktemp("iambic")
    (path / "plays").mkdir()
    rng = np.random.default_rng(3)
    text = ""
    for role, length in LENGTHS.items():
        letters = "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz "), length - 1)).replace("  ", " a").strip()
        text += f"**{role}**  \n{letters}\n\n"
    (path / "plays" / "play.md").write_text(text)
    return str(path)


def made(folder: str, **changed: Any) -> Shakespeare:
    return Shakespeare(
        folder, **{"minimum_characters": 300, "sequence_length": 12, "stride": 4, "hidden": 8, **changed}
    )


def places(windows: np.ndarray, labels: np.ndarray, text: str) -> list[int]:
    """Where the predicted characters stand."""
    found = []
    for window, label in zip(windows, labels, strict=True):
        whole = decode([*window, label])
        assert text.count(whole) == 1
        found.append(text.index(whole) + len(window))
    return found


@pytest.mark.parametrize("stride", [1, 5, 12])
@pytest.mark.parametrize("test_share", [0.1, 0.2])
def test_the_test_is_the_end_of_what_a_client_says(folder: str, stride: int, test_share: float) -> None:
    workload = made(folder, stride=stride, test_share=test_share, test_samples=None)
    roles = read_roles(folder)
    features, labels = workload._train
    tested: set[int] = set()
    for name, rows in zip(workload.client_names, workload._partition, strict=True):
        text = roles[name]
        start = len(text) - round(test_share * len(text))
        trained = places(features[rows], labels[rows], text)
        assert trained == list(range(12, start, stride))
        mine = [i for i, window in enumerate(workload._test[0]) if decode([*window, workload._test[1][i]]) in text]
        # Everything that is seen in training lies before everything that is predicted in the test.
        assert places(workload._test[0][mine], workload._test[1][mine], text) == list(range(start, len(text), stride))
        tested |= set(mine)
    assert len(tested) == len(workload._test[1])


def test_clients_are_the_roles_that_say_enough_and_unequal(folder: str) -> None:
    workload = made(folder)
    assert workload.client_names == [("play", "ANNA"), ("play", "BERTA"), ("play", "CARL")]
    counts = workload.client_samples()
    assert counts[1] > counts[0] > counts[2] > 0
    assert made(folder, minimum_characters=600).client_names == workload.client_names[:2]


def test_the_seed_draws_the_roles(folder: str) -> None:
    drawn = {seed: made(folder, clients=2, seed=seed) for seed in range(12)}
    assert all(len(each.client_names) == 2 for each in drawn.values())
    assert len({tuple(each.client_names) for each in drawn.values()}) == 3
    again = made(folder, clients=2, seed=5)
    assert again.client_names == drawn[5].client_names
    for one, other in zip((*again._train, *again._test), (*drawn[5]._train, *drawn[5]._test), strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_limit_keeps_part_of_the_test(folder: str) -> None:
    whole, part = made(folder, test_samples=None), made(folder, test_samples=20)
    assert len(part._test[1]) == 20 < len(whole._test[1])
    assert {row.tobytes() for row in part._test[0]} < {row.tobytes() for row in whole._test[0]}


@pytest.mark.parametrize("model", ["gru", "lstm", "transformer"])
def test_a_batch_is_what_the_tasks_bring_alone(folder: str, model: Any) -> None:
    local = LocalTraining(batch_size=8, learning_rate=0.1, steps=3)
    workload = made(folder, model=model, local=local)
    assert workload.not_batched is None
    start = workload.initial_model(0)
    tasks = [Task(client, start, seed=client) for client in range(3)]
    for task, found in zip(tasks, workload.train_batch([(workload, task) for task in tasks], 2**28), strict=True):
        torch.testing.assert_close(found.values, workload.train(task).values, rtol=1e-4, atol=1e-5)


def accuracies(workload: Shakespeare, time_s: float) -> Sequence[float]:
    run = fa.simulate(
        fa.strategies.fedbuff(concurrency=3, buffer_size=2),
        fa.Population(duration_s=fa.laws.Exponential(1.0)),
        workload,
        time_s=time_s,
        evaluate_every_s=time_s,
    )
    return list(run.metrics.filter(name="accuracy")["value"])


def test_fedbuff_learns_what_can_be_predicted(tmp_path: Path) -> None:
    (tmp_path / "plays").mkdir()
    rhymes = "".join(
        f"**{role}**  \n" + verse * 30 + "\n\n" for role, verse in {"A": "abc", "B": "bca", "C": "cab"}.items()
    )
    (tmp_path / "plays" / "rhyme.md").write_text(rhymes)
    local = LocalTraining(batch_size=8, learning_rate=0.02, optimizer="adam")
    workload = Shakespeare(str(tmp_path), minimum_characters=50, sequence_length=4, stride=1, hidden=16, local=local)
    assert accuracies(workload, 10.0)[-1] > 0.9


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"clients": 0}, "Shakespeare: clients must be an integer ≥ 1, got 0"),
        ({"clients": 4}, "clients must be at most 3, the roles with minimum_characters = 300, got 4"),
        ({"minimum_characters": 9000}, "no role speaks minimum_characters = 9000; use fewer"),
        ({"sequence_length": 400}, "CARL of play has 3.. ?: raise minimum_characters"),
        ({"sequence_length": 0}, "Shakespeare: sequence_length must be an integer ≥ 1, got 0"),
        ({"stride": 0}, "Shakespeare: stride must be an integer ≥ 1, got 0"),
        ({"test_share": 1.0}, "Shakespeare: test_share must be a finite number > 0 and < 1, got 1.0"),
        ({"test_samples": 0}, "Shakespeare: test_samples must be an integer ≥ 1, got 0"),
        ({"model": "rnn"}, "Shakespeare: model must be 'gru' or 'lstm' or 'transformer', got 'rnn'"),
        ({"model": "transformer", "hidden": 9}, "hidden must be a multiple of the transformer's 4 heads, got 9"),
        ({"layers": 0}, "Shakespeare: layers must be an integer ≥ 1, got 0"),
        ({"seed": -1}, "Shakespeare: seed must be an integer ≥ 0, got -1"),
    ],
)
def test_parameters_out_of_range_are_named(folder: str, parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as info:
        made(folder, **parameters)
    assert "\n" not in str(info.value)


def test_without_torch_the_remedy_is_named(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"needs torch .*pip install 'fedasync\[torch\]'"):
        made(folder)
