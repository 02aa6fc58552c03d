"""fedasync, its peers and bare loops on the same work: client updates per CPU-second, start-up, memory, accuracy.

    make bench PEERS="flwr flgo appfl"
    python bench/peers.py flwr flgo --repeats 3 --only W1-async --figure peers.png

Every measurement is a process of its own, a peer's in its own virtual environment with pinned versions. CPU time is
user + system time of the whole process tree, what ended included. Memory is sampled at 4 Hz and at each mark
(``protocol.mark``), summed over the tree as PSS, which is too low while strangers map the same libraries, and as RSS,
which counts a page once for each process of the tree. Start-up goes from the start of Python until the first update or
round is done; the rate counts what follows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "peers"
sys.path[:0] = [str(HERE), str(SCRIPTS)]

from process_tree import last_line, measure  # noqa: E402

PEERS = ("flwr", "flgo", "appfl")
OURS = ("fedasync", "bare torch", "bare SimPy")
FLOORS = {"W1-sync": "bare torch", "W1-async": "bare torch", "W1-study": "bare torch", "W2": "bare SimPy"}
NO_DEPS = "# no-deps"


@dataclass(frozen=True)
class Case:
    """One measurement: a system on a workload."""

    system: str
    workload: str
    setting: str
    script: str
    arguments: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        return self.workload, self.setting, self.system


NEAR, TAIL = "10 in flight, near-constant", "10 in flight, exponential"
EXPONENTIAL = ("--law", "exponential")
LARGE = ("100,000 in flight of 1,000,000", ("--in-flight", "100000", "--completions", "1000000"))
CASES = (
    Case("bare torch", "W1-sync", "10 of 100", "bare_torch.py"),
    Case("fedasync", "W1-sync", "10 of 100", "fedasync_run.py", ("W1-sync",)),
    Case("flwr", "W1-sync", "10 of 100", "flwr_w1.py"),
    Case("flgo", "W1-sync", "10 of 100", "flgo_w1.py", ("W1-sync",)),
    Case("appfl", "W1-sync", "10 of 100", "appfl_vsim.py", ("W1-sync",)),
    Case("fedasync", "W1-async", NEAR, "fedasync_run.py", ("W1-async",)),
    Case("flgo", "W1-async", NEAR, "flgo_w1.py", ("W1-async",)),
    Case("appfl", "W1-async", NEAR, "appfl_vsim.py", ("W1-async",)),
    Case("fedasync", "W1-async", TAIL, "fedasync_run.py", ("W1-async", *EXPONENTIAL)),
    Case("flgo", "W1-async", TAIL, "flgo_w1.py", ("W1-async", *EXPONENTIAL)),
    Case("appfl", "W1-async", TAIL, "appfl_vsim.py", ("W1-async", *EXPONENTIAL)),
    Case("fedasync", "W1-async", "100 in flight, near-constant", "fedasync_run.py", ("W1-async", "--in-flight", "100")),
    Case(
        "fedasync",
        "W1-async",
        "100 in flight, exponential",
        "fedasync_run.py",
        ("W1-async", "--in-flight", "100", *EXPONENTIAL),
    ),
    Case("fedasync", "W1-study", "5 seeds × 4 strategies", "fedasync_study.py"),
    Case("bare SimPy", "W2", "1,000 in flight of 10,000", "bare_simpy.py"),
    Case("fedasync", "W2", "1,000 in flight of 10,000", "fedasync_run.py", ("W2",)),
    Case("appfl", "W2", "1,000 in flight of 10,000", "appfl_vsim.py", ("W2",)),
    Case("bare SimPy", "W2", LARGE[0], "bare_simpy.py", LARGE[1]),
    Case("fedasync", "W2", LARGE[0], "fedasync_run.py", ("W2", *LARGE[1], "--clients", "1000000")),
)

CANNOT = {
    ("flwr", "W1-async"): "no asynchronous strategy and no virtual clock",
    ("flwr", "W2"): "no virtual clock",
    ("flgo", "W2"): "trains at every dispatch: no timing-only mode",
}


# -- environments ------------------------------------------------------------------------------------------------------


def requirements(text: str) -> tuple[list[str], list[str]]:
    """The pins of a peer's file: with their dependencies, and (below ``# no-deps``) without them."""
    with_deps, _, without = text.partition(NO_DEPS)
    pins = [[line for line in part.splitlines() if "==" in line] for part in (with_deps, without)]
    return pins[0], pins[1]


def environment(peer: str, cache: Path) -> Path:
    """The Python of a peer's virtual environment, made when it is missing or its pins changed."""
    text = (SCRIPTS / f"{peer}.txt").read_text()
    folder = cache / peer / "venv"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.is_file() and ready.read_text() == text:
        return python
    print(f"{peer}: installing {folder}; the first time this takes minutes", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    with_deps, without = requirements(text)
    torch = [pin for pin in with_deps if pin.startswith("torch==")]
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _call(sys.executable, "-m", "venv", str(folder))
    _call(*pip, *torch)  # first and alone, so that nothing pulls another build of it
    _call(*pip, *with_deps)
    if without:
        _call(*pip, "--no-deps", *without)
    ready.write_text(text)
    return python


def _call(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(last_line(done.stderr) or f"{command[0]} ended with status {done.returncode}")


def versions(system: str) -> str:
    """Name and version, as pinned or installed."""
    if system in PEERS:
        with_deps, without = requirements((SCRIPTS / f"{system}.txt").read_text())
        pins = dict(pin.split("==") for pin in with_deps + without)
        return f"{system} {next(number for name, number in pins.items() if name.split('[')[0] == system)}"
    package = {"fedasync": "fedasync", "bare torch": "torch", "bare SimPy": "simpy"}[system]
    return f"{system} {version(package).partition('+')[0]}"


def source() -> str:
    """Digest of fedasync's source: what was measured, when its version says little."""
    digest = hashlib.sha256()
    for path in sorted((HERE.parent / "fedasync").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


# -- all of them -------------------------------------------------------------------------------------------------------


def measure_all(
    cases: Sequence[Case], pythons: Mapping[str, Path], repeats: int, results: Path, limit_s: float
) -> list[dict[str, Any]]:
    """Every case ``repeats`` times, in an order that is rotated and turned round from one repetition to the next."""
    found = []
    for repetition in range(repeats):
        cut = repetition * len(cases) // repeats
        order = [*cases[cut:], *cases[:cut]]
        for place, case in enumerate(reversed(order) if repetition % 2 else order):
            stem = "-".join("".join(c if c.isalnum() else "_" for c in part) for part in (*case.key, str(repetition)))
            row: dict[str, Any] = {**asdict(case), "repetition": repetition, "place": place}
            row |= {"version": versions(case.system), "load_average": os.getloadavg()[0]}
            if case.system == "fedasync":
                row["source"] = source()
            command = [str(pythons[case.system]), str(SCRIPTS / case.script), *case.arguments]
            try:
                path = (SCRIPTS, HERE.parent) if case.system in OURS else (SCRIPTS,)
                row |= measure(command, results / f"{stem}.log", limit_s, path)
                said = f"{row['updates_per_cpu_s']:,.0f} per CPU-s"
            except RuntimeError as error:
                row["error"] = str(error)
                said = f"failed: {error}"
            print(f"[load {row['load_average']:.1f}] {' | '.join(case.key)}: {said}", flush=True)
            (results / f"{stem}.json").write_text(json.dumps(row, indent=1) + "\n")
            found.append(row)
    return found


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Median and range of each case over its repetitions, and the median's ratio to the floor's."""
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["workload"], row["setting"], row["system"]), []).append(row)
    found = []
    for (workload, setting, system), group in groups.items():
        good = [row for row in group if "error" not in row]
        line: dict[str, Any] = {"workload": workload, "setting": setting, "system": system}
        line |= {"version": group[0]["version"], "repetitions": len(good), "failed": len(group) - len(good)}
        line["sources"] = len({row.get("source") for row in group})
        if not good:
            found.append({**line, "error": group[-1]["error"]})
            continue
        if bad := [row for row in group if "error" in row]:
            line["failures"] = bad[-1]["error"]
        for name in ("updates_per_cpu_s", "updates_per_wall_s", "startup_cpu_s", "startup_wall_s", "total_cpu_s"):
            line[name] = _spread([row[name] for row in good])
        for name in ("peak_pss_mb", "peak_rss_mb", "processes"):
            line[name] = _spread([row[name] for row in good])
        line["updates"] = good[0]["updates"]
        line["accuracy"] = None if good[0]["accuracy"] is None else _spread([row["accuracy"] for row in good])
        digests = {row["sha256"] for row in good}
        line["same_weights"] = None if None in digests or len(good) == 1 else len(digests) == 1
        found.append(line)
    rates: dict[tuple[str, str], float] = {}
    for line in found:
        if line["system"] in FLOORS.values() and "error" not in line:
            for setting in (line["setting"], ""):  # of the same setting, or of the first that has one
                rates.setdefault((line["system"], setting), line["updates_per_cpu_s"]["median"])
    for line in found:
        system = FLOORS[line["workload"]]
        floor = rates.get((system, line["setting"]), rates.get((system, "")))
        if floor and "error" not in line:
            line["times_floor"] = line["updates_per_cpu_s"]["median"] / floor
    places = {case.key: place for place, case in enumerate(CASES)}
    return sorted(found, key=lambda line: places[line["workload"], line["setting"], line["system"]])


def _range(spread: Mapping[str, float]) -> tuple[float, float]:
    return spread["least"], spread["most"]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


# -- what is shown -----------------------------------------------------------------------------------------------------

HEAD = (
    "workload",
    "setting",
    "system",
    "updates / CPU-s",
    "range",
    "× bare loop",
    "start-up CPU-s",
    "peak PSS / RSS MB",
    "accuracy",
    "same weights",
)


def markdown(lines: Sequence[Mapping[str, Any]], peers: Sequence[str], workloads: Sequence[str]) -> str:
    """The table, with a dash where a system cannot run a workload or failed, and below it why."""
    rows, notes = [], []
    for line in lines:
        where = [line["workload"], line["setting"], line["version"]]
        if "error" in line:
            rows.append([*where, *["—"] * 7])
            notes.append(f"{line['version']}, {line['workload']}: {line['error']}")
            continue
        if line.get("sources", 1) > 1:
            notes.append(f"{line['version']}, {line['workload']}, {line['setting']}: its source changed meanwhile")
        if line.get("failed"):
            notes.append(
                f"{line['version']}, {line['workload']}, {line['setting']}: {line['failed']} of "
                f"{line['failed'] + line['repetitions']} repetitions failed: {line['failures']}"
            )
        rate, accuracy = line["updates_per_cpu_s"], line["accuracy"]
        rows.append(
            [
                *where,
                f"{rate['median']:,.0f}",
                f"{rate['least']:,.0f} – {rate['most']:,.0f}",
                f"{line['times_floor']:.2g}" if "times_floor" in line else "",
                f"{line['startup_cpu_s']['median']:.1f}",
                f"{line['peak_pss_mb']['median']:,.0f} / {line['peak_rss_mb']['median']:,.0f}",
                "" if accuracy is None else f"{accuracy['median']:.3f}",
                {True: "yes", False: "no", None: ""}[line["same_weights"]],
            ]
        )
    for (peer, workload), why in CANNOT.items():
        if peer in peers and workload in workloads:
            rows.append([workload, "", versions(peer), *["—"] * 7])
            notes.append(f"{versions(peer)}, {workload}: {why}")
    order = list(dict.fromkeys(case.workload for case in CASES))
    table = [HEAD, ["---"] * 3 + ["---:"] * 6 + ["---"], *sorted(rows, key=lambda row: order.index(row[0]))]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in table), "", *(f"* {note}" for note in notes)])


def draw(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Bars on logarithmic axes: client updates per CPU-second beside peak memory, floors hatched and as lines."""
    from matplotlib.figure import Figure

    good = [line for line in lines if "error" not in line]
    colours = dict(
        zip((*OURS, *PEERS), ("#0072B2", "#BBBBBB", "#BBBBBB", "#D55E00", "#009E73", "#CC79A7"), strict=True)
    )
    headings = list(dict.fromkeys((line["workload"], line["setting"]) for line in good))
    height = 0.25 * (len(good) + 2 * len(headings)) + 0.9
    figure = Figure(figsize=(9.0, height), dpi=150, layout="constrained")
    rate, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    y, ticks, labels = 0.0, [], []
    for heading in headings:
        group = [line for line in good if (line["workload"], line["setting"]) == heading]
        what = "completions" if heading[0] == "W2" else "client updates"
        rate.text(0.0, y, f"{heading[0]}: {heading[1]} ({what})", transform=rate.get_yaxis_transform(), va="center",
                  fontsize=8, fontweight="bold")  # fmt: skip
        top = y + 0.4
        for line in group:
            y += 1.0
            floor = line["system"] in FLOORS.values()
            look = {"color": colours[line["system"]], "height": 0.8, "hatch": "///" if floor else None}
            ends = (line["peak_pss_mb"]["median"], line["peak_rss_mb"]["median"])
            for axes, value, (least, most), text in (
                (rate, line["updates_per_cpu_s"]["median"], _range(line["updates_per_cpu_s"]), ""),
                (memory, ends[0], ends, f" – {ends[1]:,.0f}"),
            ):
                axes.barh(y, value, edgecolor="white", linewidth=0, **look)
                axes.plot([least, most], [y, y], color="#222222", linewidth=0.8)
                axes.annotate(f" {value:,.0f}{text}", (most, y), va="center", fontsize=7)
            ticks.append(y)
            labels.append(line["version"])
        floors = [line for line in good if line["system"] == FLOORS[heading[0]]]
        floors = [line for line in floors if line["setting"] == heading[1]] or floors
        if floors:
            rate.plot(
                [floors[0]["updates_per_cpu_s"]["median"]] * 2, [top, y + 0.5], "--", color="#222222", linewidth=1
            )
        y += 1.6
    for axes, title in (
        (rate, "per CPU-second (whole process tree)"),
        (memory, "peak memory, MB (bars: PSS, lines: to RSS)"),
    ):
        axes.set_xscale("log")
        axes.set_xlabel(title, fontsize=8)
        axes.tick_params(labelsize=7.5)
        axes.spines[["top", "right"]].set_visible(False)
        low, high = axes.get_xlim()
        axes.set_xlim(low, high * 2.5)
    rate.set_yticks(ticks, labels)
    rate.set_ylim(y - 0.6, -0.8)
    figure.suptitle(
        "hatched bars and dashed lines: bare loops of the same work; thin lines: range of the repetitions", fontsize=8
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"any of {', '.join(PEERS)}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=FLOORS, default=list(FLOORS), help="workloads (default: all)")
    parser.add_argument("--cache", type=Path, default=HERE.parent / ".bench", help="environments and results")
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds after which a measurement is given up")
    parser.add_argument("--figure", type=Path, help="also draw the figure, as PNG")
    parser.add_argument("--summary", type=Path, help="show an earlier summary.json instead of measuring")
    options = parser.parse_args()
    if unknown := set(options.peers) - set(PEERS):
        parser.error(f"no peer is called {min(unknown)!r}; there are {', '.join(PEERS)}")
    if options.summary:
        earlier = json.loads(options.summary.read_text())
        lines, peers, workloads = earlier["lines"], earlier["peers"], earlier["workloads"]
    else:
        peers, workloads = options.peers, [workload for workload in FLOORS if workload in options.only]
        lines = _run(options, workloads)
    print(f"\n{markdown(lines, peers, workloads)}")
    if options.figure:
        draw(lines, options.figure)
    return 0 if any("error" not in line for line in lines) else 1


def _run(options: argparse.Namespace, workloads: Sequence[str]) -> list[dict[str, Any]]:
    cache = options.cache.resolve()
    results = cache / "results" / time.strftime("%Y%m%d-%H%M%S")
    results.mkdir(parents=True, exist_ok=True)
    pythons, missing = dict.fromkeys(OURS, Path(sys.executable)), {}
    for peer in options.peers:
        try:
            pythons[peer] = environment(peer, cache)
        except (RuntimeError, OSError) as error:
            missing[peer] = f"not installed: {error}"
            print(f"{peer}: {missing[peer]}", flush=True)
    floors = {FLOORS[workload] for workload in workloads}
    wanted = [c for c in CASES if c.workload in workloads or c.system in floors]
    rows = [
        {**asdict(case), "version": versions(case.system), "error": missing[case.system]}
        for case in wanted
        if case.system in missing
    ]
    rows += measure_all(
        [case for case in wanted if case.system in pythons], pythons, options.repeats, results, options.limit_s
    )
    lines = summarise(rows)
    machine = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
    summary = {"machine": machine, "peers": options.peers, "workloads": workloads, "lines": lines}
    (results / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"results: {results}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
