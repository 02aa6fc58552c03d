"""How a server gets new weights: a folder of safetensors, and the calls that make it read them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedasync.rl.engine import KvCache, LoadError
from fedasync.rl.openai_requests import Requests, ServerError
from fedasync.rl.openai_settings import Call, WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf)(\.index\.json)?")
_VERSION = re.compile(r"version-(\d+)")


class WeightUpdateError(LoadError):
    """The server did not take the weights. ``serves``: the version it goes on with, None where that is unknown."""

    def __init__(self, message: str, serves: int | None) -> None:
        super().__init__(message)
        self.serves = serves


def write(update: WeightUpdate, weights: Mapping[str, Tensor], version: int) -> Path:
    """A model's folder with these weights, whole or not there at all; older ones beyond ``kept`` are removed."""
    from safetensors.torch import save_file

    place = Path(update.folder).resolve()
    folder, half = place / f"version-{version}", place / f".version-{version}.{os.getpid()}"
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    for file in sorted(Path(update.companions).iterdir()) if update.companions else ():
        if file.is_file() and not _WEIGHTS.fullmatch(file.name):
            shutil.copy(file, half)
    apart = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    save_file(apart, half / "model.safetensors", {"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    half.rename(folder)
    for number in sorted(_versions(place), reverse=True)[update.kept :]:
        if number != version:
            shutil.rmtree(place / f"version-{number}")
    return folder


def _versions(place: Path) -> list[int]:
    found = [_VERSION.fullmatch(each.name) for each in place.iterdir()]
    return [int(match[1]) for match in found if match]


class Updater:
    """Brings weights to the server of ``requests``; every call is bounded."""

    def __init__(self, update: WeightUpdate, requests: Requests) -> None:
        self.update, self.requests = update, requests
        self.retries = 0
        """Further attempts that were needed so far."""

    def __call__(self, weights: Mapping[str, Tensor], version: int, before: int, kv: KvCache) -> None:
        """Raises WeightUpdateError; ``before`` is the version that the server has."""
        if self.update.mode == "none":
            return
        folder, begun = str(write(self.update, weights, version)), False
        try:
            for call in self.update.before:
                self._call(call, folder, version, kv)
            begun = True
            self._update(folder, version, kv)
        except ServerError as error:
            told = [str(error), *self._afterwards(self.update.after, folder, before, kv)]
            serves = self.serves(before if error.known or not begun else None)
            raise WeightUpdateError(self._told(told, version), serves) from None
        if odd := self._afterwards((*self.update.named, *self.update.after), folder, version, kv):
            raise WeightUpdateError(self._told(odd, version), self.serves(None))
        serves = self.serves(version)
        if serves != version:
            raise WeightUpdateError(self._told([f"it was told to, and says it has {serves}"], version), serves)

    def serves(self, otherwise: int | None) -> int | None:
        """The version that the server says it has; ``otherwise`` where it is not asked, None where it does not say."""
        if self.update.check is None:
            return otherwise
        try:
            found = self._call(self.update.check, "", 0, "recompute")
        except ServerError:
            return None  # the caller tells, and asks again before it relies on the server
        value = found.get(self.update.check_field) if isinstance(found, dict) else None
        return int(str(value)) if str(value).isdecimal() else None

    def _update(self, folder: str, version: int, kv: KvCache) -> None:
        for left in range(self.update.retries, -1, -1):
            try:
                self._call(self.update.update, folder, version, kv)
                return
            except ServerError as error:
                if not error.again or not left:
                    raise
                self.retries += 1

    def _afterwards(self, calls: Sequence[Call], folder: str, version: int, kv: KvCache) -> list[str]:
        """Make all these calls, whatever becomes of them; what went wrong."""
        odd = []
        for call in calls:
            try:
                self._call(call, folder, version, kv)
            except ServerError as error:
                odd.append(str(error))
        return odd

    def _call(self, call: Call, folder: str, version: int, kv: KvCache) -> Any:
        """Its answer. Raises ServerError; also for an answer that says ``"success": false``."""
        if call.kv not in (None, kv):
            return None
        call = call.filled(folder, version, kv)
        limit = self.update.timeout_s
        try:
            # The loop's own limit comes first; the other is for a loop that does not get to it.
            work = self.requests.call(call.method, call.path, call.body, limit)
            found = self.requests.run(work, limit + 10.0, call.path)
        except ServerError as error:
            if call.optional and "HTTP 404" in str(error):
                return None
            raise
        if isinstance(found, dict) and found.get("success") is False:
            raise ServerError(f"{call.path}: not done: {found.get('message') or 'no reason given'}")
        return found

    def _told(self, odd: list[str], version: int) -> str:
        return f"weights of version {version} did not get to {self.requests.server.url}: {'; '.join(odd)}"
