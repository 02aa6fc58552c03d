"""What a completions server is asked before a run, and which settings there are for it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fedasync.rl.openai_requests import Requests, ServerError
from fedasync.rl.openai_settings import OpenAIServer, WeightUpdate, server_of
from fedasync.rl.openai_start import check
from fedasync.rl.sampling import Sampling

from .openai_cases import (
    QUICK,
)
from .openai_server import MODEL, ChainServer, Characters, Faults


def test_a_check_accepts_a_sound_server_and_names_what_is_wrong_with_others() -> None:
    def problem(faults: Faults, temperature: float = 1.0, model: str = MODEL, **options: Any) -> str | None:
        with ChainServer(faults) as server:
            made = Requests(OpenAIServer(server.url, model, **QUICK | options), Sampling(4, temperature), Characters())
            try:
                check(made, Characters(), 5.0)
            except ServerError as error:
                return str(error).replace(server.url, "URL")
            finally:
                made.close()
        return None

    assert problem(Faults()) is None
    assert problem(Faults(), 0.7) is None
    assert problem(Faults(raw=True)) is None, "at temperature 1 they are the same"
    raw = "URL: its log-probs at temperature 0.7 are those at 1, not those of what is drawn from: "
    assert problem(Faults(raw=True), 0.7) == raw + "--logprobs-mode processed_logprobs would do"
    assert problem(Faults(), model="other") == f"URL serves {MODEL}, not other"
    assert "no log-prob for 1 of 1 tokens" in str(problem(Faults(log_probs="none")))
    assert problem(Faults(log_probs="none"), missing_log_probs="nan") is None
    assert "> 0 (logits instead of log-probs?)" in str(problem(Faults(log_probs="positive")))
    assert "HTTP 500: the engine is dead" in str(problem(Faults(status=500)))


def test_a_server_that_is_not_there_is_waited_for_so_long_and_no_longer() -> None:
    with ChainServer() as gone:
        pass
    made = Requests(OpenAIServer(gone.url, MODEL, **QUICK), Sampling(4), Characters())
    with pytest.raises(ServerError, match=r"/v1/models: ConnectError: .*waited 0.2 s"):
        check(made, Characters(), 0.2)
    made.close()


def test_a_shorter_context_of_the_server_is_told() -> None:
    with ChainServer() as server:
        server.max_model_len = 32
        made = Requests(OpenAIServer(server.url, MODEL, **QUICK), Sampling(4), Characters())
        with pytest.warns(UserWarning, match="a context of 32 tokens and the policy one of 64"):
            check(made, Characters(), 5.0)
        made.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"url": "127.0.0.1:8000"}, 'url must be such as "http://127.0.0.1:8000"'),
        ({"url": "http://me:secret@x"}, "key_variable names an environment variable"),
        ({"dialect": "tgi"}, "dialect must be 'vllm' or 'sglang' or 'plain'"),
        ({"stream": False, "interrupted": "continue"}, "needs stream = true"),
        ({"retries": -1}, "retries must be an integer ≥ 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpenAIServer(**({"url": "http://x", "model": MODEL} | wrong))
    with pytest.raises(ValueError, match="folder must be one that the server reads too"):
        WeightUpdate("http")


def test_a_table_says_which_server_and_how_weights_get_there() -> None:
    told = server_of(
        {"url": "http://x", "model": "m", "retries": 1, "update": {"kind": "vllm", "folder": "f", "timeout_s": 9.0}}
    )
    assert (told.retries, told.update.timeout_s, told.update.update.path) == (1, 9.0, "/collective_rpc")
    own = server_of(
        {"url": "http://x", "model": "m", "update": {"kind": "http", "folder": "f", "update": {"path": "/new"}}}
    )
    assert own.update.update.filled("f/version-3", 3, "keep").path == "/new"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"model": "m"}, "engine: missing 1 required positional argument: 'url'"),
        ({"url": "http://x", "model": "m", "retry": 1}, "engine: got an unexpected keyword argument 'retry'"),
        ({"url": "http://x", "model": "m", "update": {"kind": "trt"}}, "engine.update: kind must be 'none' or"),
        ({"url": "http://x", "model": "m", "update": {"kind": "http"}}, "folder must be one that the server reads"),
        (
            {"url": "http://x", "model": "m", "update": {"kind": "http", "folder": "f", "after": [{"path": "go"}]}},
            'path must begin with "/"',
        ),
    ],
)
def test_a_table_that_says_what_cannot_be_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        server_of(table)
