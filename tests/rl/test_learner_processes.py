from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedasync.rl.learner import Learner

from .learner_process import NAMES, SEED, VERSIONS, batch_of, problem_of

torch.set_num_threads(1)
RANKS, WAIT_S = 2, 600
HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ran(folder: Path, how: str, kind: str) -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """What each of two processes wrote."""
    told = {
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, str(HERE / "learner_process.py"), str(folder), how, kind]
    processes = [
        subprocess.Popen(
            words,
            env=os.environ | told | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        for process in processes:
            said, _ = process.communicate(timeout=WAIT_S)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [
        (json.loads((folder / f"rank{rank}.json").read_text()), load_file(folder / f"rank{rank}.safetensors"))
        for rank in range(RANKS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "kind", "wrapped"),
    [
        ("ddp", "language", "DistributedDataParallel"),
        ("ddp", "control", "DistributedDataParallel"),
        ("fsdp", "language", "FSDPLlamaForCausalLM"),
        ("ddp", "critic", "DistributedDataParallel"),
        ("fsdp", "critic", "FSDPLlamaForCausalLM"),
    ],
)
def test_two_processes_are_one(tmp_path: Path, how: str, kind: str, wrapped: str) -> None:
    """Weights, metrics and measures, up to rounding; among themselves to the last bit; and so is what was saved."""
    alone = Learner(problem_of(kind), SEED)
    published = alone.weights()
    told = [alone.train(batch_of(kind, version)) for version in range(VERSIONS)]
    saved = alone.weights()
    measured = alone.measure(NAMES, published)
    told.append(alone.train(batch_of(kind, VERSIONS)))
    ranks = ran(tmp_path, how, kind)
    for about, weights in ranks:
        assert (about["ranks"], about["wrapped"], about["same_after_restore"]) == (RANKS, wrapped, True)
        for one, other in zip(about["metrics"], told, strict=True):
            assert one == pytest.approx(other, rel=1e-6, abs=1e-8)
        assert about["measured"] == pytest.approx(measured, rel=1e-6, abs=1e-8)
        assert weights.keys() == saved.keys()
        for name, each in alone.weights().items():
            torch.testing.assert_close(weights[name], each, rtol=1e-6, atol=1e-9)
            assert torch.equal(weights[name], ranks[0][1][name])
    one = Learner(problem_of(kind), SEED)
    one.restore(tmp_path / "saved")
    assert one.version == VERSIONS
    for name, each in one.weights().items():
        torch.testing.assert_close(each, saved[name], rtol=1e-6, atol=1e-9)
    assert one.train(batch_of(kind, VERSIONS)) == pytest.approx(told[-1], rel=1e-6, abs=1e-8)
