"""The folder is one that Flower builds and runs, and it says what was asked for."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from flwr.common.config import get_fab_config, get_fused_config_from_dir, parse_config_args

from fedasync.flower.app_folder import write
from fedasync.flower.configuration import flatten, unflatten
from fedasync.studies.app_folder_command import deployment_config, write_app_folder
from fedasync.studies.errors import StudyError

CONFIG: dict[str, Any] = {
    "strategy": {"name": "fedbuff", "buffer_size": 4, "note": 'a "quoted" ü\ttext'},
    "deployment": {"work_s_by_client": [1.0, 0.0], "most_samples": None},
    "seed": 2**70,
}


def test_flower_reads_the_configuration_that_was_written(tmp_path: Path) -> None:
    write(tmp_path / "app", CONFIG)
    assert unflatten(get_fused_config_from_dir(tmp_path / "app", {})) == CONFIG


def test_flwr_build_makes_a_bundle_of_that_one_file(tmp_path: Path) -> None:
    write(tmp_path / "app", CONFIG, name="my-app")
    flwr = Path(sys.executable).parent / "flwr"
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(tmp_path / "home")}
    built = subprocess.run(
        [sys.executable, flwr, "build", "--app", "app"],
        cwd=tmp_path,
        env=os.environ | quiet,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "missing" not in built.stdout  # no property that Flower recommends
    (bundle,) = tmp_path.glob("fedasync.my-app.*.fab")
    with zipfile.ZipFile(io.BytesIO(bundle.read_bytes())) as files:
        assert sorted(files.namelist()) == [".info/CONTENT", "pyproject.toml"]
    app = get_fab_config(bundle)["tool"]["flwr"]["app"]
    assert app["components"]["clientapp"] == "fedasync.apps.client_app:app"
    assert app["config"] == flatten(CONFIG)


def test_a_folder_with_anything_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"is not empty: mine\.txt is there"):
        write(tmp_path, CONFIG)
    with pytest.raises(ValueError, match="is a file"):
        write(tmp_path / "mine.txt", CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", ["", "1st", "an_app", "a" * 33, "a b"])
def test_names_that_flower_does_not_take_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="32 letters, digits and hyphens"):
        write(tmp_path / "app", CONFIG, name=name)
    assert not (tmp_path / "app").exists()


def test_the_command_writes_what_can_be_changed_when_it_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["strategy.concurrency=4", "strategy.buffer_size=2", "workload.clients=8", "seed=3", "run.updates=12"]
    write_app_folder(
        tmp_path / "app",
        "quadratic",
        "fedbuff",
        [*changes, "targets.loss=0.5", "run.evaluate_every_s=5", "out=/data/run"],
    )
    assert f"flwr run {tmp_path / 'app'}" in capsys.readouterr().out
    override = parse_config_args(["run.updates=20 deployment.poll_s=0.5 resume=true"])
    config = unflatten(get_fused_config_from_dir(tmp_path / "app", override))
    assert config["strategy"] == {"name": "fedbuff", "concurrency": 4, "buffer_size": 2}
    assert config["workload"] == {"kind": "quadratic", "clients": 8}
    assert (config["run"]["updates"], config["run"]["time_s"], config["deployment"]["poll_s"]) == (20, None, 0.5)
    assert (config["targets"], config["seed"], config["out"], config["resume"]) == ({"loss": 0.5}, 3, "/data/run", True)


def test_a_run_has_an_end_which_the_user_may_set() -> None:
    given = ["strategy.concurrency=4", "workload.clients=8"]
    assert deployment_config("quadratic", "fedasync", given)["run"]["updates"] == 100
    assert deployment_config("quadratic", "fedasync", [*given, "run.versions=5"])["run"]["updates"] is None


@pytest.mark.parametrize(
    ("workload", "strategy", "changes", "said"),
    [
        (
            "digit",
            "fedasync",
            ["strategy.concurrency=1"],
            "workload.kind: unknown name 'digit'; did you mean 'digits'?",
        ),
        ("quadratic", "fedbuf", [], "strategy.name: unknown name 'fedbuf'; did you mean 'fedbuff'?"),
        ("quadratic", "fedbuff", ["strategy.bufer_size=2"], "bufer_size: unknown key"),
        ("no_such_module.mine", "fedasync", ["strategy.concurrency=1"], "importing it raised ModuleNotFoundError"),
        ("quadratic", "fedasync", ["strategy.concurrency=1", "workload.clients=0"], "clients"),
        ("quadratic", "fedasync", ["strategy.concurrency=1", "run.server_step_s=1"], "server_step_s: unknown key"),
        (
            "quadratic",
            "fedasync",
            ["strategy.concurrency=1", "deployment.poll_s=0"],
            "poll_s must be a finite number > 0",
        ),
        ("quadratic", "fedasync", ["strategy.concurrency=1", "seed='x'"], 'seed: got "x"'),
        ("quadratic", "fedasync", ["population.clients=3"], "unknown key"),
        ("quadratic", "fedasync", ["strategy"], "write it as dotted.key=value"),
        ("quadratic", "fedasync", ["run=3"], "unknown key"),
    ],
)
def test_a_mistake_is_told_before_anything_is_written(
    tmp_path: Path, workload: str, strategy: str, changes: list[str], said: str
) -> None:
    with pytest.raises(StudyError) as refusal:
        write_app_folder(tmp_path / "app", workload, strategy, changes)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "app").exists()


def test_its_toml_is_plain(tmp_path: Path) -> None:
    written = tomllib.loads(write(tmp_path / "app", {"run": {"updates": 3}}).read_text())
    assert written["tool"]["flwr"]["app"]["config"] == {"run.updates": 3}
