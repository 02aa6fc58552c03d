"""What is told arrives as it was told, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.rl.engine import Finished, Iteration, Request
from fedasync.trainer.messages import (
    Message,
    decoded,
    encoded,
    failed,
    finished,
    finished_of,
    groups_of,
    hello,
    iterations,
    iterations_of,
    load,
    requests_of,
    submit,
    train,
    withdraw,
)

from .fakes import group, trajectory

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
finished_answers = st.lists(
    st.builds(
        lambda answer, tokens, why, own, start, prompt: Finished(
            answer, trajectory(tokens) if tokens else None, why, own, start, start + 1, prompt
        ),
        st.integers(0, 10**12),
        st.lists(st.integers(0, 10**6), min_size=2, max_size=6) | st.none(),
        st.none() | st.text(max_size=9),
        st.booleans(),
        st.floats(0, 1e6),
        st.integers(0, 99),
    ),
    max_size=5,
)


@settings(max_examples=60)
@given(st.text(max_size=9), st.dictionaries(st.text(max_size=5), plain, max_size=4), st.binary(max_size=40))
def test_a_message_comes_back(kind: str, header: dict[str, object], body: bytes) -> None:
    message = Message(kind, header, body)
    assert decoded(encoded(message)) == message


@settings(max_examples=40)
@given(finished_answers)
def test_finished_answers_come_back(answers: list[Finished]) -> None:
    assert finished_of(decoded(encoded(finished(answers)))) == answers


def test_what_is_not_finite_comes_back() -> None:
    header = decoded(encoded(Message("trained", {"metrics": {"loss": float("nan"), "least": float("-inf")}}))).header
    assert np.isnan(header["metrics"]["loss"])
    assert header["metrics"]["least"] == float("-inf")


def test_requests_iterations_and_groups_come_back() -> None:
    requests = [Request(7, 3, 1, 0), Request(8, 3, 1, 1)]
    rows = [Iteration(1.5, 4, 77, 0.01, 12, 0.02)]
    groups = [group(4, [0.5, 1]), group(9, [])]
    assert requests_of(decoded(encoded(submit(requests)))) == requests
    assert iterations_of(decoded(encoded(iterations(rows)))) == rows
    message = decoded(encoded(train(5, groups, ["kl"])))
    assert groups_of(message) == groups
    assert message.header == {"version": 5, "asks": ["kl"]}


def test_headers_are_plain() -> None:
    assert load(3, "keep", drain=True).header == {"version": 3, "kv": "keep", "drain": True}
    assert withdraw({9, 4}).header == {"answers": [4, 9]}
    assert hello(2, "worker").header.keys() == {"number", "kind", "pid", "clock_s"}


def test_a_failure_is_told_in_one_line_and_in_full() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        header = failed(error, fatal=False, version=4).header
    assert header["what"] == "ValueError: two lines"
    assert "test_messages.py" in header["traceback"]
    assert (header["fatal"], header["version"]) == (False, 4)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x09\0\0\0[]", b"\x02\0\0\0[]", b"\x02\0\0\0{}", b"\x06\0\0\0[1,{}]", b"\x04\0\0\0\xff\xff\xff\xff"],
)
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="these bytes hold no message"):
        decoded(content)
