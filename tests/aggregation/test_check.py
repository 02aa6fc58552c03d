"""A bad contribution is rejected by name, and the model does not change, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedasync.aggregation import update
from fedasync.aggregation.check import Defect, taken
from fedasync.aggregation.fedasync import Mixing
from fedasync.aggregation.fedavg import SampleWeightedMean
from fedasync.aggregation.fedbuff import DeltaMean
from fedasync.aggregation.fedfa import WindowMean
from fedasync.aggregation.model import Contribution, Model
from fedasync.aggregation.server import Server
from fedasync.core import Sliding, Tumbling

from .scalars import Runtime, brings, model

MODEL = model(1.0, 2.0, 3.0)
GOOD = brings(1.0, 2.0, 3.0, samples=5)
NAN, INF = float("nan"), float("inf")


def defect(contribution: Contribution, base: Model) -> Defect | None:
    """What the server finds wrong, in the form in which the contribution comes."""
    found = taken(contribution, base, getattr(contribution, "form", "parameters"), ())
    return found if isinstance(found, Defect) else None


BAD: dict[str, tuple[Contribution, str, str]] = {
    "nan": (brings(1.0, NAN, 3.0), "not finite", "1 of 3 values are NaN or infinite"),
    "infinite": (brings(INF, -INF, 3.0), "not finite", "2 of 3 values"),
    "too short": (brings(1.0, 2.0), "wrong shape", "shape [2], the model has [3]"),
    "not flat": (replace(GOOD, values=torch.ones(3, 1, dtype=torch.float64)), "wrong shape", "[3, 1]"),
    "single precision": (brings(1.0, 2.0, 3.0, dtype=torch.float32), "wrong dtype", "torch.float32"),
    "no samples": (brings(1.0, 2.0, 3.0, samples=0), "no samples", "samples = 0; an integer ≥ 1 would do"),
    "negative samples": (brings(1.0, 2.0, 3.0, samples=-4), "no samples", "samples = -4"),
    "half a sample": (replace(GOOD, samples=1.5), "no samples", "samples = 1.5"),  # type: ignore[arg-type]
    "true samples": (replace(GOOD, samples=True), "no samples", "samples = True"),
    "neither model nor delta": (
        replace(GOOD, form="gradient"),  # type: ignore[arg-type]
        "unknown form",
        "form 'gradient'; 'parameters' or 'delta' would do",
    ),
}


def test_a_good_contribution_has_no_defect() -> None:
    assert defect(GOOD, MODEL) is None
    assert defect(replace(GOOD, form="delta"), MODEL) is None


@pytest.mark.parametrize("case", BAD)
def test_a_defect_is_named_with_what_was_found(case: str) -> None:
    contribution, reason, detail = BAD[case]
    found = defect(contribution, MODEL)
    assert found is not None
    assert found.reason == reason
    assert detail in found.detail
    assert "\n" not in found.detail


def test_finite_values_whose_sum_overflows_are_fit_for_use() -> None:
    large = torch.full((3,), 3e38, dtype=torch.float32)
    assert not large.sum().isfinite()
    assert defect(Contribution(large, "parameters", 1), model(0.0, 0.0, 0.0, dtype=torch.float32)) is None


def test_infinities_that_cancel_are_found() -> None:
    found = defect(brings(INF, 1.0, -INF), MODEL)
    assert found is not None
    assert found.reason == "not finite"


def test_a_numpy_integer_is_an_integer() -> None:
    """Sample counts often come out of an array."""
    assert defect(replace(GOOD, samples=np.int64(5)), MODEL) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("nothing", [None, {"w": 1.0}, torch.ones(3)], ids=lambda x: type(x).__name__)
def test_what_is_no_contribution_at_all_is_a_defect_too(nothing: Any) -> None:
    assert defect(nothing, MODEL) is not None


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize(
    ("update", "buffer"),
    [
        (Mixing(), Tumbling(1)),
        (DeltaMean(), Tumbling(2)),
        (WindowMean(), Sliding(2)),
        (SampleWeightedMean(), Tumbling(2)),
    ],
    ids=["fedasync", "fedbuff", "fedfa", "fedavg"],
)
def test_a_bad_contribution_leaves_the_model_bit_for_bit(case: str, update: Any, buffer: Any) -> None:
    contribution, reason, _ = BAD[case]
    runtime = Runtime(update, buffer, model(0.1, 0.2, 0.3))
    lease = runtime.start()
    runtime.bring(runtime.start(), brings(5.0, 6.0, 7.0))
    runtime.bring(runtime.start(), brings(-5.0, 6.0, 7.0))
    before = runtime.server.model.values.numpy().tobytes()
    version = runtime.coordinator.version
    runtime.bring(lease, replace(contribution, values=contribution.values.clone()))
    assert runtime.server.model.values.numpy().tobytes() == before
    assert runtime.coordinator.version == version
    assert runtime.coordinator.ledger.rejected == {reason: 1}


@pytest.mark.parametrize("spoilt", [(), (0,), (9,), (3, 4, 8)], ids=str)
@pytest.mark.parametrize("form", ["parameters", "delta"])
@pytest.mark.parametrize("rule", [DeltaMean(), WindowMean()], ids=["wants_delta", "wants_parameters"])
def test_what_is_not_finite_is_counted_as_it_came(
    rule: Any, form: Any, spoilt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all blocks, whether the form changes or not; and the base stays as it was."""
    monkeypatch.setattr(update, "BLOCK", 4)
    server = Server(rule, model(*[1.0] * 10))
    server.lease(0, 0)
    base = server.base(0)
    values = torch.ones(10, dtype=torch.float64)
    values[list(spoilt)] = torch.tensor([NAN, INF, -INF][: len(spoilt)], dtype=torch.float64)
    found = server.receive(0, Contribution(values, form, 1))
    assert found == (("not finite", f"{len(spoilt)} of 10 values are NaN or infinite") if spoilt else None)
    assert base.values.tolist() == [1.0] * 10


@pytest.mark.parametrize("form", ["parameters", "delta"])
def test_a_difference_or_sum_that_overflows_is_not_finite(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "BLOCK", 2)
    large = 3e38
    server = Server(
        DeltaMean() if form == "parameters" else WindowMean(), model(large, large, -large, dtype=torch.float32)
    )
    server.lease(0, 0)
    sign = -1 if form == "parameters" else 1
    found = server.receive(0, brings(sign * large, 0.0, -sign * large, form=form, dtype=torch.float32))
    assert found == ("not finite", "2 of 3 values are NaN or infinite")


def test_a_second_contribution_of_a_lease_is_refused_and_changes_nothing() -> None:
    server = Server(Mixing(), model(1.0))
    server.lease(0, 0)
    assert server.receive(0, brings(2.0)) is None
    with pytest.raises(KeyError):
        server.receive(0, brings(3.0))
    assert float(server.model.values) == 1.0
    assert float(server._kept[0].input.values) == 2.0


class TestIntegerState:
    """BatchNorm's num_batches_tracked: carried as the largest that came in, never averaged into a float."""

    def norm(self, batches: int, shift: float = 0.0) -> Model:
        return Model.from_tensors(
            {
                "bn.weight": torch.tensor([1.0 + shift, 2.0]),
                "bn.num_batches_tracked": torch.tensor(batches),
                "fc.weight": torch.tensor([[3.0], [4.0]]),
            }
        )

    def brings(self, batches: int) -> Contribution:
        theirs = self.norm(batches, shift=1.0)
        return Contribution(theirs.values, "parameters", 1, theirs.integers)

    @pytest.mark.parametrize("update", [SampleWeightedMean(), DeltaMean(), Mixing(), WindowMean()], ids=str)
    def test_the_largest_is_carried_on_as_an_integer(self, update: Any) -> None:
        buffer = Sliding(2) if isinstance(update, WindowMean) else Tumbling(2)
        runtime = Runtime(update, buffer, self.norm(1))
        for batches in (5, 3):
            runtime.bring(runtime.start(), self.brings(batches))
        tracked = runtime.server.model.tensors()["bn.num_batches_tracked"]
        assert int(tracked) == 5
        assert tracked.dtype == torch.int64
        assert tracked.shape == ()

    def test_older_versions_keep_their_own(self) -> None:
        runtime = Runtime(SampleWeightedMean(), Tumbling(1), self.norm(1))
        old = runtime.start()
        base = runtime.server.base(old)
        runtime.bring(runtime.start(), self.brings(9))
        assert base.integers is not None
        assert base.integers.tolist() == [1]

    @pytest.mark.parametrize("integers", [None, torch.tensor([1, 2]), torch.tensor([1.0])], ids=str)
    def test_a_contribution_without_the_models_integers_is_rejected(self, integers: Any) -> None:
        found = defect(replace(self.brings(3), integers=integers), self.norm(1))
        assert found is not None
        assert found.reason == "wrong integers"
