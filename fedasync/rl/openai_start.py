"""What is asked of a completions server before anything is learnt from it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from fedasync.rl.engines import is_control
from fedasync.rl.openai_engine import OpenAIEngine
from fedasync.rl.openai_protocol import Collected, MalformedError, Reader, completion_body
from fedasync.rl.openai_requests import Requests, ServerError
from fedasync.rl.openai_settings import OpenAIServer
from fedasync.rl.policy import weights_of
from fedasync.rl.sampling import Sampling

if TYPE_CHECKING:
    from fedasync.rl.environment import Environment
    from fedasync.rl.language_policy import LanguagePolicy
    from fedasync.rl.problem import Problem

ASK_EVERY_S = 0.5

_HINTS = {
    "vllm": "--logprobs-mode processed_logprobs would do",
    "sglang": "SGLANG_RETURN_ORIGINAL_LOGPROB must not be set",
    "plain": "temperature = 1 would do",
}


def openai_engine_of(
    problem: Problem,
    policy: LanguagePolicy,
    server: OpenAIServer,
    seed: int,
    *,
    max_running: int = 64,
    reward_timeout_s: float | None = None,
    wait_s: float = 600.0,
) -> OpenAIEngine:
    """An engine on a server that has been checked. Raises ServerError: it is not there after ``wait_s``, or unfit.

    ``policy`` gives the tokenizer, the size of the vocabulary, and the weights that are not trained. Raises ValueError
    for a control task, which has no text.
    """
    environment = problem.environment
    if is_control(environment):
        raise ValueError('engine: a completions server answers texts; kind = "own" would do for a control task')
    vocabulary = policy.module.get_input_embeddings().num_embeddings  # type: ignore[operator]
    engine = OpenAIEngine(
        cast("Environment", environment),
        policy,
        problem.sampling,
        server,
        seed,
        max_running=max_running,
        reward_timeout_s=reward_timeout_s,
        vocabulary=int(vocabulary),
        frozen=weights_of(policy.module) if server.update.mode == "http" else {},
    )
    try:
        check(engine.requests, policy, wait_s)
    except BaseException:
        engine.close()
        raise
    return engine


def check(requests: Requests, reader: Reader, wait_s: float) -> None:
    """The server is there, serves the model, says tokens and log-probabilities, and these know the temperature.

    Raises ServerError with what is not so; warns where the server's context is shorter than the policy's.
    """
    served = _there(requests, wait_s)
    models = served.get("data") if isinstance(served, Mapping) else None
    named = {str(each.get("id")): each for each in models or () if isinstance(each, Mapping)}
    server = requests.server
    if named and server.model not in named:
        raise ServerError(f"{server.url} serves {', '.join(sorted(named))}, not {server.model}")
    longest = named.get(server.model, {}).get("max_model_len")
    if isinstance(longest, int) and longest < reader.context_tokens:
        warnings.warn(
            f"{server.url} has a context of {longest} tokens and the policy one of {reader.context_tokens}: longer "
            "answers end there",
            stacklevel=2,
        )
    told = _probe(requests, reader, requests.sampling.temperature)
    if requests.sampling.temperature != 1:
        _check_temperature(requests, told, _probe(requests, reader, 1.0))


def _there(requests: Requests, wait_s: float) -> Any:
    """What it says of its models, asked until it answers."""
    end_s = time.monotonic() + wait_s
    while True:
        try:
            limit_s = max(1.0, min(requests.server.silence_timeout_s, end_s - time.monotonic()))
            return requests.run(requests.call("GET", "/v1/models", None, limit_s), limit_s + 10, "/v1/models")
        except ServerError as error:
            if not error.again or time.monotonic() >= end_s:
                waited = f" (waited {wait_s:g} s)" if error.again else ""
                raise ServerError(f"{requests.server.url}: {error}{waited}") from None
        time.sleep(ASK_EVERY_S)


def _probe(requests: Requests, reader: Reader, temperature: float) -> dict[str, float]:
    """One token after one; the log-probabilities of the most likely ones there."""
    server, sampling = requests.server, Sampling(1, temperature)
    prompt = [next(token for token in range(len(reader.end_tokens) + 1) if token not in reader.end_tokens)]
    body = completion_body(server, sampling, reader.end_tokens, prompt, 1, 0)
    body |= {"logprobs": 5, "stream": False}
    body.pop("stream_options", None)
    limit_s = server.silence_timeout_s
    answer = requests.run(requests.call("POST", "/v1/completions", body, limit_s), limit_s + 10, "/v1/completions")
    collected = Collected(0, prompt)
    try:
        if not isinstance(answer, dict):
            raise MalformedError("its answer is not an object")
        collected.add(answer)
        collected.settle(reader, 1, server.missing_log_probs)
    except MalformedError as error:
        raise ServerError(f"{server.url}: asked for one token, {error}") from None
    top = (answer["choices"][0].get("logprobs") or {}).get("top_logprobs") or [None]
    return dict(top[0] or {})


def _check_temperature(requests: Requests, told: Mapping[str, float], at_one: Mapping[str, float]) -> None:
    """Log-probabilities that are the same at two temperatures are of another distribution than the one drawn from.

    An even distribution is the same at all temperatures, and says nothing.
    """
    both = [(told[name], at_one[name]) for name in told.keys() & at_one.keys()]
    uneven = max(at_one.values(), default=0.0) - min(at_one.values(), default=0.0) > 0.1
    if uneven and len(both) > 1 and all(abs(one - other) < 1e-3 for one, other in both):
        raise ServerError(
            f"{requests.server.url}: its log-probs at temperature {requests.sampling.temperature:g} are those at 1, "
            f"not those of what is drawn from: {_HINTS[requests.server.dialect]}"
        )
