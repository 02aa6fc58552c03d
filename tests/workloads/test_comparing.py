"""How differently two versions of a classifier answer: by hand, and against the same measures of arrays."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedasync.aggregation.model import Model
from fedasync.publication import action_disagreement, categorical_kl, feature_cosine
from fedasync.workloads import Classification, Digits
from fedasync.workloads.comparing import MOST_COMPARED, compared_rows


def deep() -> nn.Module:
    body = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5))
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(6, 3)))


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


def scaled() -> nn.Module:
    return nn.Sequential(nn.Tanh(), nn.Linear(4, 3))


def log_probabilities() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3), nn.LogSoftmax(1))


def classification(module: Any = deep, tested: int = 40) -> Classification:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(60, 4)).astype(np.float32), random.integers(0, 3, 60)
    test = random.normal(size=(tested, 4)).astype(np.float32)
    return Classification(x, y, test, np.zeros(tested, np.int64), [np.arange(60)], module)


def outputs(made: nn.Module, model: Model, x: torch.Tensor) -> tuple[Any, Any]:
    """Logits and features of a version of ``deep``, computed apart."""
    made.load_state_dict(model.tensors())
    made.eval()
    with torch.no_grad():
        features = made.body(x)  # type: ignore[operator]
        return made.head(features).numpy(), features.numpy()  # type: ignore[operator]


def test_the_measures_are_those_of_arrays() -> None:
    subject = classification()
    published, current = subject.initial_model(0), subject.initial_model(1)
    x = torch.as_tensor(subject._test[0])
    (new, new_features), (old, old_features) = outputs(deep(), current, x), outputs(deep(), published, x)
    assert subject.compare(published, current) == pytest.approx(
        {
            "disagreement": action_disagreement(new, old),
            "kl": categorical_kl(new, old),
            "feature_cosine": feature_cosine(new_features, old_features),
        },
        rel=1e-5,
    )


@cache
def digits() -> Digits:
    return Digits(clients=4, hidden=8)


@pytest.mark.parametrize("make", [classification, digits], ids=["own", "digits"])
def test_equal_versions_answer_alike_to_the_last_bit(make: Any) -> None:
    subject = make()
    model = subject.initial_model(3)
    alike = {"disagreement": 0.0, "kl": 0.0, "feature_cosine": 1.0}
    assert subject.compare(model, model) == alike
    assert subject.compare(model, replace(model, values=model.values.clone())) == alike


def test_what_is_kept_of_the_published_version_is_never_another_ones() -> None:
    """A version that became the published one, and one whose values were written in place, are looked at anew."""
    subject = classification()
    one, two, three = (subject.initial_model(seed) for seed in range(3))
    first = subject.compare(one, two)
    assert subject.compare(one, three) == classification().compare(one, three)
    assert subject.compare(two, three) == classification().compare(two, three) != first
    assert subject.compare(one, two) == first
    two.values.mul_(0.5)
    assert subject.compare(two, three) == classification().compare(two, three)


@pytest.mark.parametrize("module", [linear, scaled, log_probabilities])
def test_a_module_without_features_of_its_own_gives_none(module: Any) -> None:
    """What a single learnt layer sees is the same under any two versions; a last layer must make the logits."""
    subject = classification(module)
    assert set(subject.compare(subject.initial_model(0), subject.initial_model(1))) == {"disagreement", "kl"}


@pytest.mark.parametrize(
    ("samples", "rows"), [(3, [0, 1, 2]), (512, list(range(512))), (1024, list(range(0, 1024, 2)))]
)
def test_rows_are_spread_evenly(samples: int, rows: list[int]) -> None:
    assert compared_rows(samples).tolist() == rows


def test_at_most_so_many_inputs_are_compared() -> None:
    subject = classification(tested=3 * MOST_COMPARED)
    published, current = subject.initial_model(0), subject.initial_model(1)
    spread = classification(tested=3 * MOST_COMPARED)
    spread._test = (spread._test[0][::3], spread._test[1][::3])
    assert subject.compare(published, current) == spread.compare(published, current)


def test_comparing_disturbs_neither_training_nor_a_copy() -> None:
    subject = classification()
    published, current = subject.initial_model(0), subject.initial_model(1)
    before = subject.evaluate(published)
    found = subject.compare(published, current)
    assert subject.evaluate(published) == before
    for other in (pickle.loads(pickle.dumps(subject)), copy.deepcopy(subject)):
        assert other.compare(published, current) == found
