"""What docs/rl-tasks.md shows works as it stands there."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fedasync.rl.engine import Request  # noqa: E402
from fedasync.rl.engines import engine_of  # noqa: E402
from fedasync.rl.models import POLICIES, Gpt2  # noqa: E402
from fedasync.rl.tasks import TASKS, Reverse  # noqa: E402
from fedasync.studies.problem_tables import build_problem  # noqa: E402

PAGE = (Path(__file__).parents[3] / "docs/rl-tasks.md").read_text()
TABLES = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)]
OTHERS: dict[str, Any] = {"sampling": {"max_new_tokens": 4}, "optimiser": {"learning_rate": 1e-3}}
REVERSE, MLP, GPT2 = {"kind": "reverse"}, {"kind": "mlp"}, {"kind": "gpt2", "hidden": 16, "layers": 1, "heads": 2}


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the page's modules and the files that it names."""
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / re.match(r"# (\w+\.py)", code)[1]).write_text(code)  # type: ignore[index]
    data = tmp_path / "grade_school_math/data"
    data.mkdir(parents=True)
    for name in ("train.jsonl", "test.jsonl"):
        (data / name).write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n")
        (data / name).write_text((data / name).read_text() * 128)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Say yes."}\n' * 10)
    policy = Gpt2(16, 1, 2, context_tokens=2048).make(Reverse(), 3)
    tokenizer: Any = policy.tokenizer
    for part in (policy.module, tokenizer.tokenizer):
        part.save_pretrained(tmp_path / "models/my-model")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problem(tables: dict[str, Any]) -> Any:
    return build_problem({**OTHERS, **tables}, "page.toml")


def test_the_page_has_every_task_and_every_model() -> None:
    shown = {table["task"]["kind"] for table in TABLES if "task" in table}
    assert {*TASKS, "sums.Sums"} - shown == {"cartpole"}
    shown = {table["policy"]["kind"] for table in TABLES if "policy" in table}
    assert {*POLICIES, "my_policy.Mistral"} - shown == {"llama"}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: next(iter(table.values()))["kind"])
def test_every_table_of_the_page_is_read(table: dict[str, Any], page: Path) -> None:
    if "task" in table:
        control = table["task"]["kind"] in ("cartpole", "gymnasium")
        made = problem({**table, "policy": MLP if control else GPT2})
        assert made.environment.start(0, held_out=True)
        assert made.environment.start(0)
    else:
        task = {"kind": "cartpole"} if table["policy"]["kind"] == "mlp" else REVERSE
        made = problem({**table, "task": task})
        if table["policy"]["kind"] != "smollm2":
            made.make_policy(0)


def test_the_calculator_is_asked_and_answers(page: Path) -> None:
    task = problem({"task": {"kind": "sums.Sums", "below": 20}, "policy": GPT2}).environment
    a, b = task.start(3).a, task.start(3).b
    episode = task.start(3)
    assert episode.step(f"{a}+{b}=").observation == f"{a + b}\n"
    assert episode.step(str(a + b)).reward == 1
    assert task.start(3).step("9+x=").observation == "?\n"
    assert task.start(3).step(str(a + b + 1)).reward == 0


@pytest.mark.parametrize("task", ["sums.Sums", "guess"])
def test_a_task_of_many_turns_is_generated_with_the_environments_words_in_it(task: str, page: Path) -> None:
    torch.set_num_threads(1)
    made = problem({"task": {"kind": task}, "policy": GPT2, "sampling": {"max_new_tokens": 12}})
    policy = made.make_policy(0)
    engine = engine_of(made, policy, 0)
    engine.submit([Request(n, n // 8, 0, n % 8) for n in range(64)])
    finished = []
    while len(finished) < 64:
        finished += engine.step()
    told = [each.trajectory for each in finished]
    assert all(each is not None for each in told)
    several = [each for each in told if each.turns > 1]
    assert several
    assert all(not each.generated[each.prompt_tokens :].all() for each in several)


def test_ones_own_reward_and_model(page: Path) -> None:
    made = problem({"task": TABLES[4]["task"], "policy": GPT2})
    assert made.environment.start(0).step("yes").reward == pytest.approx(0.97)
    table = next(table for table in TABLES if table.get("policy", {}).get("kind") == "my_policy.Mistral")
    policy = problem({**table, "task": REVERSE}).make_policy(0)
    assert policy.module.config.hidden_size == 16
