"""Deployments on this machine that are refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedasync.studies.deploy_local import deploy_local
from fedasync.studies.errors import StudyError


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, "quadratic"), "--clients 0"),
        ((2, "quadratics"), "deploy local: workload.kind: unknown name 'quadratics'"),
        ((2, "quadratic", "fedbuf"), "deploy local: strategy.name: unknown name 'fedbuf'"),
        ((2, "quadratic", "fedbuff", ["strategy.concurrency=3"]), "a concurrency of 3 can never be reached by 2"),
        ((2, "quadratic", "fedbuff", ["workload.clients=3"]), "--clients 2, and the workload has 3 clients"),
        ((2, "quadratic", "fedbuff", ["deployment.work_s_by_client=[1.0]"]), "got 1 numbers for 2 clients"),
        ((2, "quadratic", "fedbuff", [], Path("e")), "e is there already"),
    ],
)
def test_a_deployment_that_cannot_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e").write_text("")
    with pytest.raises(StudyError) as refusal:
        deploy_local(*arguments)  # type: ignore[arg-type]
    assert said in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["e"]
