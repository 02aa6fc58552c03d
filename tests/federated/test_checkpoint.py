"""A run that was killed goes on from its checkpoint and its journal, and no bit tells that it was."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.core import AdaptiveTimeout, Distance, EveryN
from fedasync.federated import checkpoint
from fedasync.federated.arrays import Arrays
from fedasync.federated.checkpoint import CheckpointError, load, save
from fedasync.federated.recorded import EVENTS, Recorded, digest
from fedasync.strategies import FEDERATED

from ..simulation.rows import row
from .polled import SECONDS, Polled, again, state_of
from .recording import Recording

STRATEGIES = {
    **{made.__name__: replace(row(made.__name__), lease_timeout_s=3.0) for made in FEDERATED},
    "adaptive": row("fedbuff", lease_timeout_s=AdaptiveTimeout(4.0, at_least=3)),
    "over-selected": row("fedavg", keep=2, lease_timeout_s=3.0),
    "aborting": row("fedasync", publication=EveryN(3, "abort"), lease_timeout_s=3.0),
    "by distance": row("fedbuff", publication=Distance(0.01), lease_timeout_s=3.0),
    "stopping": row("fedasync", max_staleness=2, stop_stale=True, lease_timeout_s=3.0),
    "limited round": row("safa", round_limit_s=0.9, lease_timeout_s=3.0),
    "before the step": row("fedbuff", redispatch="before_step", lease_timeout_s=3.0),
}


def fresh(name: str) -> Arrays:
    return Arrays(STRATEGIES[name], Recording(), seed=1)


@pytest.mark.parametrize("name", list(STRATEGIES))
@settings(max_examples=3)
@given(before=st.integers(0, 20), after=st.integers(0, 8), unwritten=st.booleans(), cut=st.integers(0, 150))
def test_a_killed_run_goes_on_as_the_log_says(name: str, before: int, after: int, unwritten: bool, cut: int) -> None:
    """Killed at any turn, written out or not, with any number of bytes of the log lost: the checkpoint with the rows
    after it is the run replayed from its start, and so is all that follows."""
    with tempfile.TemporaryDirectory() as place:
        folder, strategy = Path(place), STRATEGIES[name]
        play = Polled(strategy, folder)
        for _ in range(before):
            play.turn()
        play.save(folder)
        covered = Recorded(folder).size
        for _ in range(after):
            play.turn()
        if unwritten:
            play.turn(sync=False)
        play.journal.close()
        lose(folder / EVENTS, cut, at_least=covered)

        from_the_start = fresh(name)
        whole = again(strategy, folder, from_the_start)
        found = load(folder, strategy, profile=SECONDS, rows=Recorded(folder).size)
        assert found is not None
        from_there = fresh(name)
        from_there.server = found.server
        tail = again(strategy, folder, from_there, found)
        assert found.rows + tail.rows == whole.rows
        assert [row[:7] for row in tail.beyond] == [row[:7] for row in whole.beyond]
        assert state_of(tail.coordinator, from_there) == state_of(whole.coordinator, from_the_start)

        goes_on = Polled(strategy, folder)
        for _ in range(12):
            goes_on.turn()
        goes_on.journal.close()
        made: dict[int, str] = {}
        from_the_start = fresh(name)
        whole = again(strategy, folder, from_the_start, on_version=lambda v, model: made.update({v: digest(model)}))
        assert whole.beyond == ()
        assert state_of(whole.coordinator, from_the_start) == goes_on.state()
        told = Recorded(folder).versions()
        assert made == {version: told[version] for version in made}
        assert whole.versions >= 1


def lose(path: Path, cut: int, *, at_least: int) -> None:
    """The last bytes of a log never came to the disk."""
    size = path.stat().st_size
    os.truncate(path, max(41 * at_least, size - cut))


@pytest.mark.parametrize("name", ["fedbuff", "scaffold", "fedfa", "fedat"])
def test_contributions_that_a_checkpoint_covers_are_not_needed_any_more(name: str, tmp_path: Path) -> None:
    strategy, play = STRATEGIES[name], Polled(STRATEGIES[name], tmp_path)
    for turn in range(24):
        play.turn()
        if turn % 8 == 7:
            play.save(tmp_path)
            play.journal.prune(Recorded(tmp_path).size)
            assert not any(play.journal.contribution(row[2]) for row in play.journal.rows())
    for _ in range(4):
        play.turn()
    play.journal.close()
    found = load(tmp_path, strategy, profile=SECONDS)
    assert found is not None
    arrays = fresh(name)
    arrays.server = found.server
    assert state_of(again(strategy, tmp_path, arrays, found).coordinator, arrays) == play.state()


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight turns of a run, and a checkpoint."""
    play = Polled(STRATEGIES["fedbuff"], tmp_path)
    for _ in range(8):
        play.turn()
    play.save(tmp_path)
    play.journal.close()
    return tmp_path


def loaded(folder: Path, name: str = "fedbuff", **arguments: Any) -> checkpoint.Loaded | None:
    return load(folder, STRATEGIES[name], profile=SECONDS, **arguments)


def test_a_checkpoint_says_what_it_covers(folder: Path) -> None:
    found = loaded(folder)
    assert found is not None
    assert (found.rows, found.note) == (Recorded(folder).size, None)
    assert {path.name for path in (folder / "checkpoint").iterdir()} == {"state.json", "arrays.safetensors"}
    assert json.loads((folder / "checkpoint" / "state.json").read_text())["state"]["rows"] == found.rows


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert loaded(tmp_path) is None


@pytest.mark.parametrize("file", ["state.json", "arrays.safetensors"])
@given(data=st.data())
@settings(max_examples=25)
def test_a_flipped_bit_or_a_lost_tail_is_told(file: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(_example(), place, dirs_exist_ok=True)
        path = Path(place) / "checkpoint" / file
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            del content[at:]
        else:
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"checkpoint: (torn|no checkpoint of this version)") as refused:
            loaded(Path(place))
        assert "\n" not in str(refused.value)


_made: list[tempfile.TemporaryDirectory[str]] = []


def _example() -> str:
    if not _made:
        _made.append(tempfile.TemporaryDirectory())
        play = Polled(STRATEGIES["fedbuff"], Path(_made[0].name))
        for _ in range(5):
            play.turn()
        play.save(Path(_made[0].name))
        play.journal.close()
    return _made[0].name


def test_a_missing_file_is_told(folder: Path) -> None:
    (folder / "checkpoint" / "arrays.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"torn: arrays\.safetensors: No such file"):
        loaded(folder)


def test_another_strategys_checkpoint_is_refused(folder: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"it does not fit: the snapshot is of strategy .*fedbuff.*not of .*fedasync"
    ):
        loaded(folder, "fedasync")


def test_a_checkpoint_of_more_rows_than_the_log_has_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it covers \d+ rows of a log, and the log here has 3"):
        loaded(folder, rows=3)


def test_another_format_is_refused(folder: Path) -> None:
    (folder / "checkpoint" / "state.json").write_text('{"state": {"format": 2}}')
    with pytest.raises(CheckpointError, match="format 2; 1 would do"):
        loaded(folder)


def test_between_the_two_renames_the_previous_one_is_used(folder: Path) -> None:
    (folder / "checkpoint").rename(folder / ".checkpoint.previous")
    found = loaded(folder)
    assert found is not None
    assert found.note is None


def test_a_torn_one_leaves_the_previous_one_and_says_so(folder: Path) -> None:
    shutil.copytree(folder / "checkpoint", folder / ".checkpoint.previous")
    (folder / "checkpoint" / "state.json").write_bytes(b"{")
    found = loaded(folder)
    assert found is not None
    assert "checkpoint: torn: state.json is not readable" in (found.note or "")


@pytest.mark.parametrize("nth", range(2))
def test_on_a_full_disk_the_former_checkpoint_stays(folder: Path, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = loaded(folder)
    assert found is not None
    before = {path.name: path.read_bytes() for path in (folder / "checkpoint").iterdir()}
    written = iter(range(9))
    whole = checkpoint.write

    def write(path: Path, content: bytes) -> None:
        if next(written) == nth:
            raise OSError(28, "No space left on device", str(path))
        whole(path, content)

    monkeypatch.setattr(checkpoint, "write", write)
    with pytest.raises(OSError, match=r"No space left on device: '.*(arrays\.safetensors|state\.json)'"):
        save(folder, found.coordinator, found.server, rows=5)
    assert {path.name: path.read_bytes() for path in (folder / "checkpoint").iterdir()} == before
    assert not (folder / ".checkpoint.partial").exists()
    monkeypatch.undo()
    save(folder, found.coordinator, found.server, rows=5)
    newer = loaded(folder)
    assert newer is not None
    assert newer.rows == 5
    assert sorted(path.name for path in folder.iterdir() if "checkpoint" in path.name) == ["checkpoint"]
