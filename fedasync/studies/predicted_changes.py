"""What ``--set`` changes of a recorded run on prompts before it is predicted, looked at before anything is fitted."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedasync.strategies import ROLLOUTS, STRATEGIES
from fedasync.studies.build import build_strategy
from fedasync.studies.errors import StudyError, did_you_mean, keys_of
from fedasync.studies.problem_tables import refuse_clients_row
from fedasync.studies.study import apply_changes


def check_changes(strategy: object, changes: Sequence[str]) -> None:
    """Raise StudyError, before anything is fitted, where changes leave a strategy that is none.

    ``strategy`` is the recorded run's table.
    """
    for change in changes:
        if _key(change).split(".")[0] == "processes":
            raise StudyError(
                f"--set {change}: a prediction has [cluster] in place of [processes]; cluster.generation_gpus are its "
                "workers, cluster.decoding.max_running what each decodes together"
            )
    if not isinstance(strategy, Mapping):
        return  # which is told where it is fitted
    base: dict[str, Any] = {"strategy": copy.deepcopy(dict(strategy))}
    apply_changes(base, (), changes)
    if base["strategy"] == strategy:
        return
    if not isinstance(base["strategy"], dict):
        raise StudyError(f"{_told(changes)}: strategy: got {base['strategy']!r}; a table would do")
    refuse_clients_row(base, _told(changes))
    _refuse_other_rows_keys(base["strategy"], strategy, changes)
    build_strategy(base, _told(changes))


def _refuse_other_rows_keys(changed: Mapping[str, Any], recorded: Mapping[str, Any], changes: Sequence[str]) -> None:
    """Say which row has a key that this one has not, and what is to be left out where the row is another one."""
    row = STRATEGIES.get(str(changed.get("name")))
    if row is None:
        return  # none, or the user's own
    own = keys_of(row)
    for key in changed:
        if key in (*own, "name"):
            continue
        change = next((each for each in changes if _names(_key(each), key)), None)
        if change is None:
            kept = {name: each for name, each in changed.items() if name in (*own, "name")}
            raise StudyError(
                f"{_told(changes)}: {row.__name__!r} has no key {key!r}, which the recorded run's "
                f"{recorded.get('name')!r} has; the whole table would do, as in --set 'strategy={_inline(kept)}' "
                f"(keys: {', '.join(own)})"
            )
        others = [other.__name__ for other in ROLLOUTS if key in keys_of(other)]
        if not others or _key(change) == "strategy":
            raise StudyError(f"--set {change}: {row.__name__!r} has no key {key!r}{did_you_mean(key, own)}")
        or_else = f" (or {', '.join(others[1:])})" if others[1:] else ""
        raise StudyError(
            f"--set {change}: {row.__name__!r} has no key {key!r}; --set strategy.name={others[0]}{or_else} beside it "
            "would do"
        )


def _names(dotted: str, key: str) -> bool:
    """Whether a change is of a key of [strategy], or of all of it."""
    return dotted == "strategy" or f"{dotted}.".startswith(f"strategy.{key}.")


def _key(change: str) -> str:
    return change.partition("=")[0].strip()


def _inline(value: object) -> str:
    """A value of TOML on one line."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_inline(each)}' for key, each in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    return json.dumps(value)


def _told(changes: Sequence[str]) -> str:
    return " ".join(f"--set {change}" for change in changes)


def of_changes(error: StudyError, study_file: Path, changes: Sequence[str]) -> StudyError:
    """What is wrong with a study that was right before it was changed is what the changes say."""
    said = str(error)
    if not changes or not said.startswith(f"{study_file}: "):
        return error
    return StudyError(f"{_told(changes)}: {said.removeprefix(f'{study_file}: ')}", error.status)
