"""Requests to a completions server, many at a time: one thread with a loop of its own, and nobody waits without end.

The engine's thread starts work, cancels it and takes what has ended; the loop's thread alone touches connections.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import aclosing
from dataclasses import dataclass, field
from math import isnan
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fedasync.rl.engine import LoadError
from fedasync.rl.openai_protocol import Collected, MalformedError, Text, completion_body, error_text
from fedasync.rl.openai_settings import OpenAIServer
from fedasync.rl.sampling import Sampling

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

LONGEST_WAIT_S = 30.0
"""Between two attempts."""

CANCEL_S = 10.0
"""The longest that the loop may take to give up requests."""


class ServerError(LoadError):
    """The server did not do what it was asked for.

    ``again``: another attempt might help. ``own_fault``: the request itself is at fault, and would fail again.
    ``known``: it surely did not; False where it may have done it all the same (nothing was heard of it, say).
    """

    def __init__(self, message: str, *, again: bool = False, own_fault: bool = False, known: bool = True) -> None:
        super().__init__(message)
        self.again, self.own_fault, self.known = again, own_fault, known


@dataclass(eq=False)
class Work:
    """One turn of an answer that is being generated. Only the loop's thread writes until it has ended."""

    answer: int
    prompt: Sequence[int]
    most: int
    """Tokens, of all its attempts together."""
    version: int
    seed: Callable[[int], int]
    """Of the request that begins with the turn's token of a number."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str | None = None
    """None where it was cancelled or failed."""
    failure: str | None = None
    own_fault: bool = False
    attempts: int = 0
    missing: int = 0
    started_s: float = 0.0
    heard_s: float = 0.0
    """When something last came, by ``time.monotonic``."""
    collected: Collected | None = None
    over: bool = False
    """It has ended, and will not change any more."""

    def stamp(self, version: int) -> None:
        """Tokens of a stream that come from now on are of this version."""
        self.version = version
        if self.collected is not None:
            self.collected.version = version

    def keep(self, collected: Collected, ends: Collection[int]) -> None:
        """Its tokens are the turn's. They may end it, though the server did not come to say so."""
        self.tokens += collected.tokens
        self.log_probs += collected.log_probs
        self.versions += collected.versions
        self.missing += sum(isnan(value) for value in collected.log_probs)
        self.collected = None
        if self.tokens and self.tokens[-1] in ends:
            self.finish = "stop"
        elif collected.finish == "length" or len(self.tokens) == self.most:
            self.finish = "length"


class Requests:
    """Work on one server."""

    def __init__(self, server: OpenAIServer, sampling: Sampling, text: Text) -> None:
        """Raises ValueError where the bearer token's variable is not set."""
        import httpx

        self.server, self.sampling, self.text = server, sampling, text
        self.named: set[int] = set()
        """Versions whose numbers the server was told."""
        self._key = server.key
        self._limits = httpx.Timeout(server.silence_timeout_s, connect=server.connect_timeout_s, pool=None)
        self._headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._ended: SimpleQueue[tuple[Work, BaseException | None]] = SimpleQueue()
        self._tasks: dict[Work, asyncio.Task[None]] = {}
        self._client: httpx.AsyncClient | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai requests", daemon=True)
        self._thread.start()

    def start(self, work: Work) -> None:
        work.started_s = work.heard_s = time.monotonic()

        def begin() -> None:
            task = self._loop.create_task(self._generate(work))
            self._tasks[work] = task
            task.add_done_callback(lambda done: self._end(work, done))

        self._loop.call_soon_threadsafe(begin)

    def cancel(self, works: Collection[Work]) -> None:
        """Give these up; each still comes out of ``ended``, with what it has and no finish. Waits until they have."""

        async def give_up() -> None:
            tasks = [self._tasks[work] for work in works if work in self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        if works:
            self.run(give_up(), CANCEL_S, "giving up requests")

    def runs(self, work: Work) -> bool:
        """It has begun and not ended."""
        return not work.over

    def ended(self, wait_s: float) -> list[Work]:
        """Work that has ended, waiting for the first so long at most. An error of this program is raised."""
        found: list[Work] = []
        try:
            entry = self._ended.get(timeout=wait_s) if wait_s > 0 else self._ended.get_nowait()
            while True:
                work, error = entry
                if error is not None:
                    raise error
                found.append(work)
                entry = self._ended.get_nowait()
        except Empty:
            return found

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """Run this in the loop's thread, for so long at most. Raises ServerError when the time is over."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            future.cancel()
            raise ServerError(f"{what} took more than {timeout_s:g} s ({self.server.url})", known=False) from None

    async def call(self, method: str, path: str, body: Any, timeout_s: float) -> Any:
        """One request beside the generation; its answer from JSON, None where it is empty. Raises ServerError."""
        import httpx

        try:
            async with asyncio.timeout(timeout_s):
                response = await self._connection().request(
                    method,
                    path,
                    json=body if method == "POST" else None,
                    timeout=httpx.Timeout(timeout_s, connect=self.server.connect_timeout_s),
                )
        except (TimeoutError, httpx.TimeoutException) as error:
            known = isinstance(error, httpx.ConnectTimeout)
            raise ServerError(f"{path}: no answer within {timeout_s:g} s", again=True, known=known) from None
        except httpx.RequestError as error:
            known = isinstance(error, httpx.ConnectError)
            raise ServerError(f"{path}: {_told(error)}", again=True, known=known) from None
        self._check_status(response.status_code, response.text, path)
        try:
            return json.loads(response.text) if response.text.strip() else None
        except ValueError:
            raise ServerError(f"{path}: its answer is not JSON: {response.text[:80]!r}", known=False) from None

    def close(self) -> None:
        """Give up everything. The thread has ended afterwards."""
        if not self._thread.is_alive():
            return

        async def leave() -> None:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            if self._client is not None:
                await self._client.aclose()
            await self._loop.shutdown_asyncgens()

        try:
            self.run(leave(), CANCEL_S, "closing connections")
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CANCEL_S)
            if not self._thread.is_alive():
                self._loop.close()

    def _connection(self) -> httpx.AsyncClient:
        """Made in the loop's thread. Proxies of the environment are not used: the server is one of ours."""
        import httpx

        if self._client is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            self._client = httpx.AsyncClient(
                base_url=self.server.url, headers=self._headers, timeout=self._limits, limits=limits, trust_env=False
            )
        return self._client

    def _end(self, work: Work, task: asyncio.Task[None]) -> None:
        del self._tasks[work]
        if work.collected is not None:
            work.collected.partial(self.server.missing_log_probs)
            work.keep(work.collected, self.text.end_tokens)
        work.over = True
        self._ended.put((work, None if task.cancelled() else task.exception()))

    async def _generate(self, work: Work) -> None:
        """Attempts until one ends; those that break off keep what they have given."""
        wait_s = self.server.retry_wait_s
        while True:
            work.attempts += 1
            prompt, most = [*work.prompt, *work.tokens], work.most - len(work.tokens)
            collected = work.collected = Collected(work.version, prompt)
            try:
                body = completion_body(
                    self.server, self.sampling, self.text.end_tokens, prompt, most, work.seed(len(work.tokens))
                )
                await self._attempt(work, collected, body)
                collected.settle(self.text, most, self.server.missing_log_probs)
                work.keep(collected, self.text.end_tokens)
                return
            except MalformedError as error:
                work.collected, work.failure, work.missing = None, f"server: {error}", work.missing + collected.missing
                return
            except ServerError as error:
                collected.finish = None
                collected.partial(self.server.missing_log_probs)
                work.keep(collected, self.text.end_tokens)
                if work.finish is not None:
                    return
                if not error.again or work.attempts > self.server.retries:
                    tries = f" ({work.attempts} attempts)" if work.attempts > 1 else ""
                    work.failure, work.own_fault = f"server: {error}{tries}", error.own_fault
                    return
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _attempt(self, work: Work, collected: Collected, body: dict[str, Any]) -> None:
        import httpx

        server, path = self.server, "/v1/completions"
        try:
            async with (
                asyncio.timeout(server.request_timeout_s),
                self._connection().stream("POST", path, json=body) as response,
            ):
                if response.status_code >= 300:
                    self._check_status(response.status_code, (await response.aread()).decode(errors="replace"), path)
                if "text/event-stream" in response.headers.get("content-type", ""):
                    await self._listen(response, work, collected)
                else:
                    self._take((await response.aread()).decode(errors="replace"), work, collected)
        except httpx.TimeoutException as error:
            limit = server.connect_timeout_s if isinstance(error, httpx.ConnectTimeout) else server.silence_timeout_s
            raise ServerError(f"{path}: silence of {limit:g} s", again=True) from None
        except TimeoutError:
            message = f"{path}: the answer took more than {server.request_timeout_s:g} s"
            raise ServerError(message, again=True) from None
        except httpx.RequestError as error:
            raise ServerError(f"{path}: {_told(error)}", again=True) from None

    async def _listen(self, response: httpx.Response, work: Work, collected: Collected) -> None:
        """The pieces of a stream, to its end. Raises ServerError where it breaks off."""
        # Closed at once, since what breaks off in the middle would be left to the loop's end.
        async with aclosing(cast("AsyncGenerator[str, None]", response.aiter_lines())) as lines:
            async for line in lines:
                content = line.removeprefix("data:").strip()
                if content == "[DONE]":
                    break
                if line.startswith("data:"):
                    self._take(content, work, collected)
        if collected.finish is None:
            raise ServerError("/v1/completions: the answer breaks off in the middle", again=True)

    def _take(self, content: str, work: Work, collected: Collected) -> None:
        try:
            answer = json.loads(content)
        except ValueError:
            raise ServerError(f"/v1/completions: its answer is not JSON: {content[:80]!r}", again=True) from None
        if not isinstance(answer, dict):
            raise MalformedError(f"its answer is {type(answer).__name__}, not an object")
        if "error" in answer:
            raise ServerError(f"/v1/completions: {error_text(content, self._key)}", again=True)
        collected.add(answer, self.named)
        work.heard_s = time.monotonic()
        if collected.finish == "abort":
            raise ServerError("/v1/completions: the server aborted the answer", again=True)

    def _check_status(self, status: int, content: str, path: str) -> None:
        """Raises ServerError for ≥ 300: 408, 425, 429 and 5xx may go away; 400, 413 and 422 are the request's fault."""
        if status >= 300:
            raise ServerError(
                f"{path}: HTTP {status}: {error_text(content, self._key)}",
                again=status in (408, 425, 429) or status >= 500,
                own_fault=status in (400, 413, 422),
                known=status < 500,
            )


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
