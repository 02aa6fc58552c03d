"""The runs of an experiment: which there are, in which order, whether they can be made at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from fedasync.simulation import Clients
from fedasync.studies import store
from fedasync.studies.deployment import build_parts, clients_of, demand_settings
from fedasync.studies.errors import StudyError
from fedasync.studies.execute import checked
from fedasync.studies.experiment_file import Experiment
from fedasync.studies.study import RunPlan


@dataclass(frozen=True)
class Measurement:
    """One run that is to be made, and the folder that it is to become."""

    plan: RunPlan
    study: str
    folder: Path

    @property
    def labels(self) -> str:
        """What tells it from the study's other runs."""
        return ", ".join([*self.plan.labels.values(), f"seed {self.plan.seed}"])


def any_finished(runs: Sequence[Measurement]) -> bool:
    return any(store.is_finished(one.folder) for one in runs)


def measurements(experiment: Experiment, folder: Path) -> list[Measurement]:
    """Every run in the order in which it is made, checked as far as can be without making it.

    All points of the axes are run with one seed before any is with the next: what is compared is measured within
    minutes of each other, on a machine in the same mood. Raises StudyError for the first that cannot run.
    """
    found: list[Measurement] = []
    worlds: dict[str, Clients | None] = {}
    holders: dict[str, int] = {}
    study = experiment.study
    for seed in study.header.seed_list:
        for plan in study.plans([seed]):
            labels = ", ".join(f"{axis} = {label}" for axis, label in plan.labels.items())
            where = f"{study.path} ({labels})" if labels else str(study.path)
            inputs = _checked(experiment, plan, where, worlds, holders)
            asked = {**plan.config, "federation": dataclasses.asdict(experiment.federation)}
            run_id = store.run_id(plan.labels, plan.seed, asked, inputs)
            found.append(Measurement(plan, study.name, folder / "runs" / run_id))
    if len({one.folder for one in found}) < len(found):
        raise StudyError(f"{study.path}: two points of the axes are one and the same run; give them different values")
    return found


def _checked(
    experiment: Experiment, plan: RunPlan, where: str, worlds: dict[str, Clients | None], holders: dict[str, int]
) -> dict[str, str]:
    """Digests of what the run reads beside its configuration. Raises StudyError for what cannot run."""
    clients = experiment.federation.clients
    parts = build_parts(plan.config, where)
    demand_settings(parts, clients, where)
    kind = repr(plan.config["workload"])
    if kind not in holders:
        holders[kind] = clients_of(plan.config, where)
    if holders[kind] != clients:
        raise StudyError(
            f"{where}: federation.clients = {clients}, and the workload has {holders[kind]} clients; the same number "
            "would do"
        )
    # All that a simulated run is refused for is refused here too, and in the same words.
    world = {"clients": clients, "duration_s": {"kind": "constant", "value": 1.0}}
    tables = {name: plan.config[name] for name in ("strategy", "workload", "run", "targets", "seed")}
    simulated = checked(RunPlan(plan.labels, plan.seed, {**tables, "population": world}), where, worlds)
    try:
        flower = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise StudyError("flwr is not installed; pip install 'fedasync[flower]' would do") from None
    return {**store.inputs(plan.config, *simulated.sources), "flwr": flower}
