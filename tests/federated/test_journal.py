"""A journal gives back what was written, whatever part of its last write was lost, and is never half written."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.aggregation.model import Contribution, Model
from fedasync.core import Coordinator
from fedasync.core.log import DELIVERED, NONE
from fedasync.federated.journal import Journal
from fedasync.federated.recorded import JournalError, Recorded, digest

from ..simulation.rows import row

REASONS = ("lost", "client error", "änderung", "")


def events(journal: Journal, count: int, first: int = 0) -> None:
    for n in range(first, first + count):
        reason = journal.log.code(REASONS[n % 4]) if n % 3 == 0 else NONE
        journal.log.append((n / 8, DELIVERED, n, n % 5, 0, n, 1, reason))


def told(recorded: Recorded) -> list[Any]:
    reasons = recorded.reasons
    return [(*each[:7], None if each[7] < 0 else reasons[each[7]]) for each in recorded.rows()]


def expected(count: int) -> list[Any]:
    return [(n / 8, DELIVERED, n, n % 5, 0, n, 1, REASONS[n % 4] if n % 3 == 0 else None) for n in range(count)]


@settings(max_examples=30)
@given(turns=st.lists(st.integers(0, 9), max_size=6), cut=st.integers(0, 300), more=st.integers(0, 5))
def test_rows_come_back_up_to_the_last_whole_one(turns: list[int], cut: int, more: int) -> None:
    """Over any number of turns, with any number of bytes lost; and a journal that goes on is one journal."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        journal, count = Journal(folder), 0
        for turn in turns:
            journal.rung(count / 8)
            events(journal, turn, count)
            count += turn
            assert len(journal.log) == count
            journal.sync()
        journal.close()
        path = folder / "events.bin"
        os.truncate(path, max(0, path.stat().st_size - cut))
        left = path.stat().st_size // 41
        assert left == max(0, count - -(-cut // 41))
        assert told(Recorded(folder)) == expected(left)

        journal = Journal(folder)
        assert path.stat().st_size == left * 41
        assert len(journal.log) == left
        rings = Recorded(folder).rings()
        assert rings is not None
        assert journal.rings == len(rings)
        assert all(before <= left for before, _ in rings)
        assert rings == sorted(rings)
        events(journal, more, left)
        journal.sync()
        assert told(Recorded(folder)) == expected(left + more)
        assert list(journal.rows(left)) == list(journal.rows())[left:]
        assert len(journal.record()) == left + more
        journal.close()


def test_a_coordinator_writes_into_it_and_its_reasons_go_on(tmp_path: Path) -> None:
    for _ in range(2):
        journal = Journal(tmp_path)
        coordinator = Coordinator(row("fedasync"), journal.log)
        for worker in range(3):
            lease = coordinator.request(worker, float(worker))
            assert lease is not None
            coordinator.fail(lease.id, ("lost", "client error")[worker % 2], float(worker))
        journal.sync()
        journal.close()
    assert Recorded(tmp_path).reasons == ["lost", "client error"]
    assert [r[7] for r in Recorded(tmp_path).rows()] == [NONE, 0, NONE, 1, NONE, 0] * 2


def test_what_is_not_synced_is_not_there(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    events(journal, 3)
    assert Recorded(tmp_path).size == 0
    journal.sync()
    assert Recorded(tmp_path).size == 3
    journal.close()


# -- contributions -------------------------------------------------------------------------------------------------


def contribution(dtype: torch.dtype = torch.float32, **fields: Any) -> Contribution:
    values = torch.tensor([1.5, float("nan"), -0.0, float("inf")], dtype=torch.float64).to(dtype)
    return replace(Contribution(values, "delta", 7, torch.tensor([3, -1]), 0.1), **fields)


def same(a: Contribution, b: Contribution) -> bool:
    def bits(tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else (tensor.dtype, tensor.shape, bytes(tensor.view(torch.uint8).numpy()))

    numbers = (a.form, a.samples, a.step_size_sum) == (b.form, b.samples, b.step_size_sum)
    return numbers and bits(a.values) == bits(b.values) and bits(a.integers) == bits(b.integers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("fields", [{}, {"integers": None}, {"step_size_sum": None, "form": "parameters"}])
def test_a_contribution_comes_back_bit_for_bit(dtype: torch.dtype, fields: dict[str, Any], tmp_path: Path) -> None:
    journal, given = Journal(tmp_path), contribution(dtype, **fields)
    journal.keep_contribution(4, given)
    journal.sync()
    found = journal.contribution(4)
    assert found is not None
    assert same(found, given)
    assert journal.contribution(5) is None
    journal.drop_contribution(4)
    journal.drop_contribution(4)
    assert journal.contribution(4) is None
    journal.close()


@settings(max_examples=60)
@given(data=st.data())
def test_any_flipped_bit_of_a_contribution_is_told(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as place:
        journal, given = Journal(place), contribution()
        journal.keep_contribution(4, given)
        journal.close()
        path = Path(place) / "contributions" / "4.safetensors"
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            del content[at:]
        else:
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        problem = ""
        try:
            found = Recorded(Path(place)).contribution(4)
        except JournalError as error:
            problem = str(error)
        if problem:
            assert "4.safetensors" in problem
            assert "\n" not in problem
        else:  # a space in the header, which says nothing
            assert found is not None
            assert same(found, given)


def test_pruning_drops_what_a_checkpoint_covers(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for lease in range(6):
        journal.keep_contribution(lease, contribution())
    events(journal, 5)
    journal.sync()
    journal.prune(2)
    assert [lease for lease in range(6) if journal.contribution(lease)] == [2, 3, 4, 5]
    journal.prune(5)
    assert [lease for lease in range(6) if journal.contribution(lease)] == [5]
    journal.close()


# -- versions --------------------------------------------------------------------------------------------------------


def test_versions_are_known_by_all_their_bits(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    model = Model.from_tensors({"w": torch.tensor([0.0, 1.0]), "count": torch.tensor([2])})
    minus = Model.from_tensors({"w": torch.tensor([-0.0, 1.0]), "count": torch.tensor([2])})
    counted = Model.from_tensors({"w": torch.tensor([0.0, 1.0]), "count": torch.tensor([3])})
    assert len({digest(each) for each in (model, minus, counted)}) == 3
    for version, each in ((1, minus), (2, counted), (1, model)):
        journal.version(version, each)
    journal.sync()
    journal.close()
    path = tmp_path / "versions.jsonl"
    assert Recorded(tmp_path).versions() == {1: digest(model), 2: digest(counted)}
    path.write_bytes(path.read_bytes() + b'{"version": 3, "sha')
    assert Recorded(tmp_path).versions() == {1: digest(model), 2: digest(counted)}
    Journal(tmp_path).close()
    assert path.read_bytes().endswith(b"}\n")
    path.write_bytes(b"[1]\n")
    with pytest.raises(JournalError, match=r"versions\.jsonl, line 1: got"):
        Recorded(tmp_path).versions()


def test_damaged_reasons_are_told(tmp_path: Path) -> None:
    (tmp_path / "reasons.json").write_text('["lost"')
    with pytest.raises(JournalError, match=r"reasons\.json: not readable"):
        Journal(tmp_path)


# -- a full disk -----------------------------------------------------------------------------------------------------


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """The system writes files of so many bytes and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_where_there_is_no_room_a_file_stays_as_it_was_and_is_named(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    events(journal, 3)
    journal.sync()
    events(journal, 5, 3)
    with no_file_beyond(41 * 3 + 50), pytest.raises(OSError, match=r"events\.bin") as refused:
        journal.sync()
    assert refused.value.filename == str(tmp_path / "events.bin")
    assert (tmp_path / "events.bin").stat().st_size == 41 * 3
    journal.sync()
    assert told(Recorded(tmp_path)) == expected(8)
    with no_file_beyond(60), pytest.raises(OSError, match=r"contributions/7\.safetensors"):
        journal.keep_contribution(7, contribution())
    assert [path.name for path in (tmp_path / "contributions").iterdir()] == []
    journal.close()


def test_a_contribution_that_was_half_written_is_cleared_away(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    half = tmp_path / "contributions" / ".3.safetensors.partial"
    half.write_bytes(b"half")
    Journal(tmp_path).close()
    assert not half.exists()
