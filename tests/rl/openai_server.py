"""A real HTTP server that speaks OpenAI's completions, for a policy of a table, with switches for what goes wrong.

The policy is a Markov chain: log-probabilities of the next token are the log-softmax of the last token's row of a table
[V, V] at the temperature. Each version has a table of its own, so that a log-probability says which version drew it.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

ALPHABET = "\0\3abcdefgh"
END = 1
MODEL = "chain"


def table(version: int, end: float = 0.0) -> NDArray[np.float64]:
    """The chain's scores [V, V] under a version; ``end`` more for the end token. Token 0 is never drawn."""
    found = np.random.default_rng(version).normal(0, 1.5, (len(ALPHABET), len(ALPHABET)))
    found[:, 0] = -1e4
    found[:, END] += end
    return found


def log_softmax(scores: NDArray[np.float64], temperature: float = 1.0) -> NDArray[np.float64]:
    scores = scores / temperature
    top = scores - scores.max()
    return top - np.log(np.exp(top).sum())


class Characters:
    """A tokenizer of characters (``openai_protocol.Reader``)."""

    end_tokens = (END,)
    pad_token = 0

    def __init__(self, context_tokens: int = 64) -> None:
        self.context_tokens = context_tokens

    def encode(self, text: str) -> list[int]:
        if strange := set(text) - set(ALPHABET):
            raise ValueError(f"no token for {sorted(strange)}")
        return [ALPHABET.index(each) for each in text]

    def encode_prompt(self, prompt: Any) -> list[int]:
        return self.encode(prompt if isinstance(prompt, str) else "".join(each["content"] for each in prompt))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(ALPHABET[token] for token in tokens)


@dataclass
class Faults:
    """What goes wrong; ``times``: for so many completions, then no more."""

    times: int = 1 << 30
    status: int = 0
    body: str = '{"error": {"message": "the engine is dead"}}'
    hang: bool = False
    reset: bool = False
    break_after: int = 0
    """Tokens, after which a stream ends without a word."""
    log_probs: str = "given"
    """"none", "null" (of the second token), "nan", "truncated", "positive"."""
    names: str = "token_ids"
    """"token_id:" (in the log-probs), "text", "hidden_end" (text, and no log-prob of the end token)."""
    extra_tokens: int = 0
    """More than were asked for."""
    miscount: int = 0
    drop_end: bool = False
    late_finish: bool = False
    """The word that an answer has ended comes after its last token."""
    raw: bool = False
    """Log-probabilities are those at temperature 1."""
    finish: str = ""
    prompt: bool = False
    """It reads another prompt than was sent."""
    not_json: bool = False
    slow_s: float = 0.0


@dataclass
class UpdateFaults:
    times: int = 1 << 30
    status: int = 0
    hang: bool = False
    success: bool = True
    ignored: bool = False
    """Says that it did, and did not."""


@dataclass
class ChainServer:
    """A context manager. Everything that tests look at is an attribute."""

    faults: Faults = field(default_factory=Faults)
    update_faults: UpdateFaults = field(default_factory=UpdateFaults)
    end: float = 0.0
    script: Callable[[Sequence[int]], str] | None = None
    """Answers by the prompt's tokens instead of drawing them; the end token follows each."""
    scorer: Callable[[Sequence[int]], NDArray[np.float64]] | None = None
    """Scores [V] of the next token, of another policy than the chain."""
    reader: Callable[[Path], None] | None = None
    """What reads a folder of weights for it."""
    spans: bool = False
    """It says which version drew which tokens."""
    max_model_len: int = 64

    def __post_init__(self) -> None:
        self.version, self.table = 0, table(0, self.end)
        self.bodies: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.keys: list[str | None] = []
        self.running = self.peak = self.sent = 0
        self.gate: int | None = None
        """Each request gets so many tokens, and waits for the others."""
        self.closing = threading.Event()
        self.lock = threading.Lock()
        server = self

        class Handler(_Handler):
            chain = server

        self.http = _Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self) -> ChainServer:
        self.thread = threading.Thread(target=lambda: self.http.serve_forever(0.02), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join(5)

    def draw(self, tokens: Sequence[int], body: dict[str, Any], position: int) -> tuple[int, float, dict[str, float]]:
        """The next token, its log-probability, and the most likely ones'."""
        scores = self.table[tokens[-1]] if self.scorer is None else self.scorer(tokens)
        drawn = log_softmax(scores, body["temperature"])
        if self.script is not None:
            prompt, rest = body["prompt"], tokens[len(body["prompt"]) :]
            answer = [ALPHABET.index(each) for each in self.script(prompt)]
            token = answer[len(rest)] if len(rest) < len(answer) else END
        else:
            noise = np.random.default_rng([body["seed"], position]).gumbel(size=len(drawn))
            token = int((drawn + noise).argmax())
        told = log_softmax(scores) if self.faults.raw else drawn
        best = {f"token_id:{at}": float(told[at]) for at in np.argsort(-told)[: body.get("logprobs") or 1]}
        return token, float(told[token]), best | {f"token_id:{token}": float(told[token])}


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """Clients that go away are none."""


class _Handler(BaseHTTPRequestHandler):
    chain: ChainServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.chain.calls.append(self.path)
        if self.path == "/v1/models":
            self._json({"data": [{"id": MODEL, "max_model_len": self.chain.max_model_len}]})
        elif self.path in ("/model_info", "/weight_info"):
            self._json({"weight_version": str(self.chain.version)})
        else:
            self._json({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"null")
        self.chain.keys.append(self.headers.get("Authorization"))
        if self.path == "/v1/completions":
            with self.chain.lock:
                self.chain.bodies.append(body)
                self.chain.running += 1
                self.chain.peak = max(self.chain.peak, self.chain.running)
            try:
                self._complete(body)
            finally:
                with self.chain.lock:
                    self.chain.running -= 1
            return
        self.chain.calls.append(self.path)
        self._update(body)

    def _update(self, body: Any) -> None:
        """All the calls of an update. Reading the folder is one of them; the others do nothing."""
        updates = {"/update_weights": "folder", "/update_weights_from_disk": "model_path"}
        folder = body["kwargs"]["weights_path"] if self.path == "/collective_rpc" else body.get(updates.get(self.path))
        if folder is None:
            known = ("/pause", "/resume", "/reset_prefix", "/continue", "/update_weight_version")
            self._json({"success": True}, 200 if self.path.startswith(known) else 404)
            return
        faults = self.chain.update_faults
        faulty, faults.times = faults.times > 0, faults.times - 1
        if faulty and faults.hang:
            self.chain.closing.wait(60)
            return
        if faulty and faults.status:
            self._json({"error": {"message": "no space\nleft"}}, faults.status)
            return
        if not (faulty and (faults.ignored or not faults.success)):
            if self.chain.reader is not None:
                self.chain.reader(Path(folder))
            else:
                self.chain.table = load_file(Path(folder) / "model.safetensors")["table"].astype(np.float64)
            self.chain.version = int(Path(folder).name.removeprefix("version-"))
        self._json({"success": not faulty or faults.success, "message": "it does not fit"})

    def _complete(self, body: dict[str, Any]) -> None:
        chain = self.chain
        faulty, chain.faults.times = chain.faults.times > 0, chain.faults.times - 1
        faults = chain.faults if faulty else Faults()
        if faults.hang:
            chain.closing.wait(60)
            return
        if faults.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        if faults.status:
            self._raw(faults.body.replace("{key}", self.headers.get("Authorization") or "").encode(), faults.status)
            return
        if faults.not_json:
            self._raw(b"<html>hello</html>", 200)
            return
        if body["stream"]:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.end_headers()
        pieces = []
        for piece in self._pieces(body, faults):
            chain.sent += 1
            if not body["stream"]:
                pieces.append(piece)
                continue
            self._event({"choices": [piece]})
            if faults.break_after and chain.sent % faults.break_after == 0:
                self.close_connection = True
                return
        usage = {"completion_tokens": self.count + faults.miscount}
        if body["stream"]:
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            self._json({"choices": [together(pieces)], "usage": usage})

    def _pieces(self, body: dict[str, Any], faults: Faults) -> Any:
        tokens, most = list(body["prompt"]), body["max_tokens"] + faults.extra_tokens
        spans: list[dict[str, Any]] = []
        self.count = 0
        for position in range(most):
            self._wait(position)
            if faults.slow_s:
                time.sleep(faults.slow_s)
            version = str(self.chain.version)
            token, log_prob, best = self.chain.draw(tokens, body, position)
            tokens.append(token)
            ends = token == END and not faults.extra_tokens
            finish = "stop" if ends else "length" if position == most - 1 else None
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = position + 1
            else:
                spans.append({"version": version, "start": position, "end": position + 1})
            hidden = ends and (faults.drop_end or faults.names == "hidden_end")
            self.count += not hidden
            piece = told(token, log_prob, best, position, faults, hidden=hidden)
            piece["finish_reason"] = (faults.finish or finish) if finish else None
            if faults.prompt:
                piece["prompt_token_ids"] = [5, 5, *body["prompt"]]
            if finish and self.chain.spans:
                piece["weight_versions"] = spans
            if finish and faults.late_finish:
                yield {**piece, "finish_reason": None}
                self._wait(position + 1)
                piece = {"text": "", "finish_reason": finish}
            yield piece
            if ends:
                return

    def _wait(self, position: int) -> None:
        """Until the gate lets this token out."""
        while (gate := self.chain.gate) is not None and position >= gate and not self.chain.closing.wait(0.002):
            pass

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        self.wfile.flush()

    def _json(self, content: Any, status: int = 200) -> None:
        self._raw(json.dumps(content).encode(), status)

    def _raw(self, content: bytes, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def told(
    token: int, log_prob: float, best: dict[str, float], position: int, faults: Faults, *, hidden: bool = False
) -> dict[str, Any]:
    """One token as a piece of a stream."""
    text = "" if token == END else ALPHABET[token]
    values: list[Any] = [log_prob]
    if faults.log_probs == "null" and position == 1:
        values = [None]
    elif faults.log_probs == "nan":
        values = [float("nan")]
    elif faults.log_probs == "positive":
        values = [2.5]
    elif faults.log_probs == "truncated" and position > 0:
        values = []
    plain = faults.names in ("text", "hidden_end")
    name = ("" if token == END else ALPHABET[token]) if plain else f"token_id:{token}"
    found: dict[str, Any] = {"index": 0, "text": text}
    if faults.log_probs != "none":
        found["logprobs"] = {
            "tokens": [] if hidden else [name],
            "token_logprobs": [] if hidden else values,
            "top_logprobs": [best],
        }
    if faults.names == "token_ids":
        found["token_ids"] = [] if hidden else [token]
    return found


def together(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pieces of a stream as one whole choice."""
    whole: dict[str, Any] = dict(pieces[-1])
    whole["text"] = "".join(each["text"] for each in pieces)
    if "token_ids" in whole:
        whole["token_ids"] = [token for each in pieces for token in each["token_ids"]]
    if "logprobs" in whole:
        whole["logprobs"] = {
            name: [value for each in pieces for value in each["logprobs"][name]]
            for name in ("tokens", "token_logprobs", "top_logprobs")
        }
    return whole
