"""The harness of the comparison with peers: accounts of process trees, pins, summaries. Nothing here takes time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCH = Path(__file__).parents[2] / "bench"

# A root that leaves an orphan behind, and a child that burns CPU time and ends before the mark.
TREE = """
import subprocess, sys
from protocol import mark
mark("start")
burn = "import time\\nx = bytearray(40_000_000)\\nwhile time.process_time() < 0.3: pass"
subprocess.run([sys.executable, "-c", burn], check=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
mark("end", updates=7)
mark("result", accuracy=0.5, sha256="ab")
"""


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    pytest.importorskip("psutil")
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("bench_peers", BENCH / "peers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = path
    return module


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are found by Linux alone")
def test_a_tree_is_counted_whole_and_nothing_is_left_of_it(peers: ModuleType, tmp_path: Path) -> None:
    import psutil

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    (tmp_path / "tree.py").write_text(TREE)
    peers.GRACE_S = 0.1
    found = peers.measure([sys.executable, str(tmp_path / "tree.py")], tmp_path / "log", limit_s=120.0)
    assert (found["updates"], found["accuracy"], found["sha256"], found["left_behind"]) == (7, 0.5, "ab", 1)
    assert found["cpu_s"] >= 0.25
    assert found["total_cpu_s"] >= found["cpu_s"]
    assert found["peak_rss_mb"] > 1
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_script_that_fails_is_one_line(peers: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise ValueError('no such thing')")
    with pytest.raises(RuntimeError, match=r"^ValueError: no such thing \(log: "):
        peers.measure([sys.executable, str(tmp_path / "bad.py")], tmp_path / "log", limit_s=60.0)


def test_every_peer_has_pins_and_every_case_a_script(peers: ModuleType) -> None:
    for peer in peers.PEERS:
        with_deps, without = peers.requirements((BENCH / "peers" / f"{peer}.txt").read_text())
        assert any(pin.startswith("torch==") for pin in with_deps)
        assert all(pin.count("==") == 1 for pin in with_deps + without)
        assert peers.versions(peer).startswith(f"{peer} ")
    assert all((BENCH / "peers" / case.script).is_file() for case in peers.CASES)
    for peer in peers.PEERS:
        for workload in ("W1-sync", "W1-async", "W2"):
            runs = any((case.system, case.workload) == (peer, workload) for case in peers.CASES)
            assert runs != ((peer, workload) in peers.CANNOT)


def test_a_summary_has_median_range_floor_and_what_failed(peers: ModuleType) -> None:
    floor, ours, failed = (c for c in peers.CASES if (c.workload, c.setting) == ("W2", "1,000 in flight of 10,000"))
    rows = [
        *(_row(floor, rate, None) for rate in (100.0, 300.0, 200.0)),
        *(_row(ours, rate, digest) for rate, digest in ((50.0, "a"), (70.0, "a"), (60.0, "b"))),
        {**_row(failed, 1.0, None), "error": "no luck"},
    ]
    lines = peers.summarise(rows)
    assert [line["system"] for line in lines] == [floor.system, ours.system, failed.system]
    assert lines[1]["updates_per_cpu_s"] == {"median": 60.0, "least": 50.0, "most": 70.0}
    assert lines[1]["times_floor"] == pytest.approx(0.3)
    partly = peers.summarise([*rows[:3], {**_row(floor, 1.0, None), "error": "a bad day"}])
    assert "1 of 4 repetitions failed: a bad day" in peers.markdown(partly, [], ["W2"])
    assert (lines[0]["same_weights"], lines[1]["same_weights"]) == (None, False)
    text = peers.markdown(lines, ["flwr", "appfl"], ["W2"])
    assert "| 60 | 50 – 70 | 0.3 |" in text
    assert f"* {failed.system} 1, W2: no luck" in text
    assert "W2: no virtual clock" in text


def test_the_figure_is_drawn_of_what_ran(peers: ModuleType, tmp_path: Path) -> None:
    cases = [case for case in peers.CASES if case.workload in ("W1-sync", "W2")]
    peers.draw(peers.summarise([_row(case, 10.0, "a") for case in cases]), tmp_path / "folder" / "bench.png")
    assert (tmp_path / "folder" / "bench.png").stat().st_size > 10_000


def test_every_system_gets_the_data_the_split_and_the_weights_that_ours_has(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from fedasync.workloads import Digits, Iid

    monkeypatch.syspath_prepend(str(BENCH / "peers"))
    threads = torch.get_num_threads()
    import w1

    try:
        workload = Digits(clients=100, partition=Iid(), hidden=32)
        flat = torch.cat([p.detach().reshape(-1) for p in w1.module().parameters()])
        assert torch.equal(workload.initial_model(0).values, flat)
        assert workload.client_samples() == [15] * 100 == [len(w1.client(i)[0]) for i in range(100)]
        split = Iid().split(np.asarray(w1.data()[1]), 100, 0)
        assert [rows.tolist() for rows in split] == w1.partition()
    finally:
        torch.set_num_threads(threads)
        for name in ("w1", "protocol"):
            sys.modules.pop(name, None)


def _row(case: object, rate: float, digest: str | None) -> dict[str, object]:
    numbers = ("updates_per_wall_s", "startup_cpu_s", "startup_wall_s", "total_cpu_s", "peak_pss_mb", "peak_rss_mb")
    row = {name: getattr(case, name) for name in ("system", "workload", "setting")}
    row |= dict.fromkeys(numbers, 1.0)
    return {
        **row,
        "version": f"{row['system']} 1",
        "updates_per_cpu_s": rate,
        "processes": 1,
        "updates": 10,
        "accuracy": 0.9,
        "sha256": digest,
    }
