"""Studies of a cluster on which a policy learns: built, refused, run and found again."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import polars as pl
import pytest

from fedasync.rl.models import Gpt2
from fedasync.rl.objective import Objective
from fedasync.rl.tasks.reverse import Reverse
from fedasync.studies import store
from fedasync.studies.build import ClusterParts, build, build_problem
from fedasync.studies.errors import StudyError
from fedasync.studies.execute import jobs
from fedasync.studies.study import load

from .rl_studies import VIRTUAL
from .running import Command, changed, contents, runs, summary

S = Path("results/s")


def refusal(path: Path, text: str) -> str:
    """Why a study cannot run; one line."""
    path.write_text(text)
    with pytest.raises(StudyError) as refused:
        jobs(load(path), path.parent / "out")
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_the_tables_are_the_problem() -> None:
    problem = build_problem(
        {
            "task": {"kind": "reverse", "length": [2, 3], "symbols": 5},
            "policy": {"kind": "gpt2", "hidden": 16},
            "sampling": {"max_new_tokens": 4, "temperature": 0.5},
            "optimiser": {"learning_rate": 1e-3, "betas": [0.9, 0.99]},
        },
        "here",
    )
    assert problem.environment == Reverse([2, 3], 5)
    assert problem.policy == Gpt2(16)
    assert problem.sampling.temperature == 0.5
    assert problem.objective == Objective()
    assert problem.optimiser.betas == (0.9, 0.99)


def test_names_may_be_dotted_paths() -> None:
    tables = {
        "task": {"kind": "fedasync.rl.tasks.reverse.Reverse", "length": 3},
        "policy": {"kind": "fedasync.rl.models.Gpt2"},
        "sampling": {"max_new_tokens": 4},
        "objective": {"loss": "tis"},
        "optimiser": {"learning_rate": 1e-3},
    }
    problem = build_problem(tables, "here")
    assert problem.environment == Reverse(3)
    assert problem.objective.option("weight_cap") == 2.0


def test_the_prompts_are_the_tasks(study: Path) -> None:
    study.write_text(changed(VIRTUAL, ("held_out = 8", "held_out = 8\nprompts = 12")))
    (first, *_) = load(study).plans()
    parts = build(first.config, "here")
    assert isinstance(parts, ClusterParts)
    assert parts.prompts.count == 12
    assert parts.problem is not None
    assert parts.learning is not None
    assert "count" not in first.config["prompts"]


def test_without_tables_of_a_problem_nothing_is_learnt(study: Path) -> None:
    study.write_text(VIRTUAL)
    (first, *_) = load(study).plans()
    config = {key: value for key, value in first.config.items() if key not in ("task", "policy", "sampling")}
    del config["optimiser"]
    config["run"] = {"versions": 4}
    config["prompts"] = {"answers": 2, "answer_tokens": {"kind": "constant", "value": 4.0}}
    parts = build(config, "here")
    assert isinstance(parts, ClusterParts)
    assert parts.learning is None


MISTAKES = {
    ('kind = "reverse"', 'kind = "revers"'): "s.toml: task.kind: unknown name 'revers'; did you mean 'reverse'?",
    ('kind = "reverse"', ""): "s.toml: task.kind: this key is missing; one of",
    ('kind = "reverse"', "kind = 3"): "s.toml: task.kind: got 3; one of",
    ("length = 2", "lenght = 2"): "s.toml: task.lenght: unknown key; did you mean 'length'?",
    ("length = 2", 'length = "2"'): 's.toml: task.length: got "2"',
    ("symbols = 4", "symbols = 1"): "s.toml: task: symbols must be an integer ≥ 2",
    ('kind = "gpt2"', 'kind = "gpt3"'): "s.toml: policy.kind: unknown name 'gpt3'; did you mean 'gpt2'?",
    ("hidden = 8", "hiden = 8"): "s.toml: policy.hiden: unknown key; did you mean 'hidden'?",
    ('kind = "gpt2"\nhidden = 8\nlayers = 1\nheads = 2\ncontext_tokens = 12', 'kind = "mlp"'): (
        "policy.kind: 'mlp' chooses among actions, and this task speaks text"
    ),
    (
        "max_new_tokens = 4",
        "max_tokens = 4",
    ): "s.toml: sampling.max_tokens: unknown key; did you mean 'max_new_tokens'?",
    ("max_new_tokens = 4", "max_new_tokens = 4.5"): "s.toml: sampling.max_new_tokens: got 4.5; an integer would do",
    ("max_new_tokens = 4", "max_new_tokens = 4\ntemperature = 0"): "s.toml: sampling: temperature must be",
    ("learning_rate = 1e-3", ""): "s.toml: optimiser.learning_rate: this key is missing",
    ("learning_rate = 1e-3", "learning_rate = true"): "s.toml: optimiser.learning_rate: got true; a number would do",
    ("learning_rate = 1e-3", 'learning_rate = 1e-3\n[objective]\nloss = "pppo"'): (
        "s.toml: objective.loss: got \"pppo\"; 'ppo', 'uncorrected'"
    ),
    ("learning_rate = 1e-3", 'learning_rate = 1e-3\n[objective]\nloss = "coupled"\nweight_cap = 2.0'): (
        "s.toml: objective: weight_cap = 2.0 says nothing with loss = 'coupled'"
    ),
    ("context_tokens = 12", "context_tokens = 12\ncritic = true"): (
        "s.toml: policy.critic: a critic is for objective.advantages = 'gae', got 'grpo'; leave it out"
    ),
    ("learning_rate = 1e-3", 'learning_rate = 1e-3\n[objective]\nadvantages = "gae"'): (
        "s.toml: objective.advantages: 'gae' needs a critic"
    ),
    ("[sampling]\nmax_new_tokens = 4", ""): "s.toml: the table [sampling] is missing",
    ("[policy]", "[polcy]"): "s.toml: polcy: unknown table; did you mean 'policy'?",
    ("[cluster]", "[processes]\n[cluster]"): "[processes] makes it an experiment, which is for `fedasync run ",
    ("[cluster]", "[population]\nclients = 2\n[cluster]"): "[population] and [cluster] in one run",
    (
        "answers = 2",
        "answers = 2\ncount = 5",
    ): "prompts.count: got 5, and the task has prompts without end; l",
    ("answers = 2", 'answers = 2\nanswer_tokens = { kind = "constant", value = 4.0 }'): (
        "prompts: answer_tokens is what the policy decides, where one is trained; leave it out"
    ),
    ("answers = 2", 'answers = 2\nprompt_tokens = { kind = "constant", value = 4.0 }'): (
        "prompts.prompt_tokens is what the task says, where a policy learns; leave it out"
    ),
    ("evaluate_every = 2", ""): "targets.exact is measured by evaluations; run.evaluate_every = 5 would do",
    ("held_out = 8", "held_out = 0"): "run.evaluate_every = 2, and the task holds no prompts out; held_out ≥ 1",
}


@pytest.mark.parametrize(("change", "said"), MISTAKES.items(), ids=[said[:60] for said in MISTAKES.values()])
def test_what_cannot_run_is_refused_in_one_line(study: Path, change: tuple[str, str], said: str) -> None:
    assert said in refusal(study, changed(VIRTUAL, change))


CLIENTS_ROW = "says how models of federated clients become one, and here one policy is trained on answers to prompts"


@pytest.mark.parametrize("row", ['name = "fedavg"\ncohort = 2', 'name = "fedbuff"\nconcurrency = 4\nbuffer_size = 2'])
def test_a_row_of_federated_clients_trains_no_policy(study: Path, row: str) -> None:
    """The policy's optimiser makes the step, so what such a row says of it would mean nothing; timing has no step."""
    text = changed(VIRTUAL, ('name = "areal"\nbatch = 2\neta = 1', row))
    assert CLIENTS_ROW in refusal(study, text)


def test_a_row_of_federated_clients_is_refused_before_its_keys_are_looked_at(fedasync: Command, study: Path) -> None:
    study.write_text(VIRTUAL)
    end = fedasync("sim", "s.toml", "--set", "strategy.name=fedbuff")
    assert (end.status, end.out) == (2, "")
    assert end.complaint.startswith(f"fedasync: s.toml: strategy.name: 'fedbuff' {CLIENTS_ROW}; synchronous_rl, ")


def test_a_task_alone_is_no_study(study: Path) -> None:
    begin, end = VIRTUAL.index("[cluster]"), VIRTUAL.index("[targets]")
    assert "the table [cluster] is missing" in refusal(study, VIRTUAL[:begin] + VIRTUAL[end:])


def test_a_users_own_environment_is_checked(folder: Path, study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    (folder / "own_task.py").write_text("class Task:\n    prompts = None\n\n\ndef broken():\n    raise KeyError('x')\n")
    importlib.invalidate_caches()
    own = changed(VIRTUAL, ('kind = "reverse"\nlength = 2\nsymbols = 4\nheld_out = 8', 'kind = "own_task.Task"'))
    assert "task: Task is no environment: it has no held_out, no start" in refusal(study, own)
    assert "task: broken raised KeyError: 'x'" in refusal(study, own.replace("own_task.Task", "own_task.broken"))
    assert "module own_task has no Tusk" in refusal(study, own.replace("own_task.Task", "own_task.Tusk"))


def test_versions_of_learning_libraries_are_part_of_the_question() -> None:
    plain, learning = store.versions(), store.versions(of_policies=True)
    assert "transformers" not in plain
    assert {"torch", "transformers"} <= learning.keys()
    config = {"task": {"kind": "reverse"}}
    name = store.run_id({}, 0, config, {})
    assert name == store.run_id({}, 0, dict(config), {})
    assert name != store.run_id({}, 0, {"task": {"kind": "reverse", "length": 3}}, {})


def test_the_runtimes_source_is_part_of_a_real_runs_question_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names() -> tuple[str, str]:
        store._source.cache_clear()
        config = {"task": {"kind": "reverse"}}
        return store.run_id({}, 0, config, {}), store.run_id({}, 0, config, {}, *store.OF_PROCESSES)

    shutil.copytree(store.PACKAGE, tmp_path / "fedasync", ignore=shutil.ignore_patterns("__pycache__"))
    assert all((store.PACKAGE / place).exists() for place in (*store.ROOMS, *store.OF_PROCESSES))
    try:
        monkeypatch.setattr(store, "PACKAGE", tmp_path / "fedasync")
        simulated, real = names()
        for place in ("trainer/controller.py", "trainer/worker.py", "apps/rollout_worker.py", "apps/trainer_rank.py"):
            with (tmp_path / "fedasync" / place).open("a") as file:
                file.write("# another line\n")
            assert names()[0] == simulated
            assert names()[1] != real
            real = names()[1]
        with (tmp_path / "fedasync" / "rl" / "learner.py").open("a") as file:
            file.write("# another line\n")
        assert names()[0] != simulated
    finally:
        monkeypatch.undo()
        store._source.cache_clear()


def test_a_policy_learns_under_the_virtual_clock(fedasync: Command, study: Path, tmp_path: Path) -> None:
    tis = ("[prompts]", '[objective]\nloss = "tis"\n\n[prompts]')
    study.write_text(changed(VIRTUAL, ("seeds = 2", "seeds = 1"), tis))
    end = fedasync("sim", "s.toml")
    assert (end.status, end.err.count("fedasync:")) == (0, 1)
    assert "its clip cannot act" in end.err  # the problem's warning, once
    (made,) = runs(S).values()
    told = summary(made)
    assert not told["timing_only"]
    assert told["versions"] == 4
    assert {"reward_mean", "exact", "reward"} <= told["final"].keys()
    assert [target["metric"] for target in told["targets"]] == ["exact"]
    metrics = pl.read_parquet(made / "metrics.parquet")
    assert metrics.filter(name="exact")["version"].to_list() == [2, 4]
    assert metrics.filter(name="reward_mean")["version"].to_list() == [1, 2, 3, 4]
    assert (S / "figures" / "learning_curves.png").is_file()
    assert fedasync("show", str(made)).status == 0
    assert fedasync("world", "s.toml").status == 0
    files = contents(made)
    assert fedasync("sim", "s.toml", "--out", str(tmp_path / "again")).status == 0
    (again,) = runs(tmp_path / "again").values()
    other = contents(again)
    assert [name for name in files if files[name] != other[name]] == []


def test_an_axis_may_vary_the_objective(study: Path, tmp_path: Path) -> None:
    study.write_text(
        changed(VIRTUAL, ("seeds = 2", "seeds = 1"))
        + '\n[[axis]]\nname = "loss"\nkey = "objective.loss"\nvalues = ["coupled", "tis", "cispo"]\n'
    )
    made = jobs(load(study), tmp_path)
    assert [job.plan.config["objective"]["loss"] for job in made] == ["coupled", "tis", "cispo"]
    assert [bool(job.warnings) for job in made] == [False, True, False]
