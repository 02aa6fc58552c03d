"""How weights get from the trainer to the rollout workers: as files, in shared memory, or over the network."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from fedasync.core.bounds import check_choice, check_integer, check_type
from fedasync.trainer.addresses import host_and_port

if TYPE_CHECKING:
    from torch import Tensor

ChannelKind = Literal["files", "shared_memory", "distributed"]
GET_S = 30.0


class ChannelError(RuntimeError):
    """Weights could not be had; the message is one line."""


class WeightChannel(Protocol):
    """One end of a channel; the trainer's puts, a worker's gets."""

    def put(self, weights: Mapping[str, Tensor], version: int) -> int:
        """Publish weights, and take back every version above; how many bytes they are."""
        ...

    def get(self, version: int, timeout_s: float = GET_S) -> tuple[dict[str, Tensor], int]:
        """The weights of a version, or the newest where that has been replaced, and which version they are.

        Tensors are the caller's own, on the CPU. Waits for a version that is not there yet; raises ChannelError after
        ``timeout_s``.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ChannelSpec:
    """Which channel, and where: a folder that both ends see, or rank 0's ``host:port`` (``distributed``)."""

    kind: ChannelKind
    place: str

    def __post_init__(self) -> None:
        check_choice("channel: kind", self.kind, ChannelKind)
        check_type("channel: place", self.place, str, "a folder, or host:port")
        if self.kind == "distributed":
            host_and_port(self.place)

    def writer(self) -> WeightChannel:
        """The trainer's end, rank 0's alone."""
        return self._end(writes=True)

    def reader(self) -> WeightChannel:
        """A worker's end."""
        return self._end(writes=False)

    def _end(self, *, writes: bool) -> WeightChannel:
        if self.kind == "files":
            return FilesChannel(Path(self.place))
        if self.kind == "shared_memory":
            from fedasync.trainer.shared_memory_channel import SharedMemoryReader, SharedMemoryWriter

            return (SharedMemoryWriter if writes else SharedMemoryReader)(Path(self.place))
        from fedasync.trainer.distributed_channel import DistributedReader, DistributedWriter

        return (DistributedWriter if writes else DistributedReader)(self.place)


class FilesChannel:
    """``weights-<version>.safetensors`` in a folder; the last ``keep`` versions stay.

    A file appears in full or not at all (written under another name, then renamed); nothing is synced to the disc,
    since a machine that crashes loses its workers too.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        check_integer("channel: keep", keep, 1)
        self.folder, self.keep = folder, keep

    def put(self, weights: Mapping[str, Tensor], version: int) -> int:
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(".weights-*"):
            left.unlink()  # of a trainer that was killed
        beside = self.folder / f".{self._path(version).name}"
        save_file(_apart(weights), beside)
        size = beside.stat().st_size
        os.replace(beside, self._path(version))
        there = self.versions()
        stay = {version, *[each for each in there if each < version][::-1][: self.keep - 1]}
        for each in set(there) - stay:
            self._path(each).unlink(missing_ok=True)
        return size

    def get(self, version: int, timeout_s: float = GET_S) -> tuple[dict[str, Tensor], int]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        until_s = time.monotonic() + timeout_s
        while True:
            there = self.versions()
            found = version if version in there else max(there, default=-1)
            if found >= version:
                try:
                    return load_file(self._path(found)), found
                except (OSError, RuntimeError, SafetensorError) as error:
                    if not self._path(found).exists():
                        continue  # replaced meanwhile
                    raise ChannelError(f"{self._path(found)} holds no weights: {error}") from None
            if time.monotonic() >= until_s:
                have = f"versions {', '.join(map(str, there))}" if there else "no weights"
                raise ChannelError(f"waited {timeout_s:g} s for version {version}: {self.folder} holds {have}")
            time.sleep(0.02)

    def close(self) -> None:
        """Files stay, for whoever still reads."""

    def versions(self) -> list[int]:
        """Those that are there, ascending."""
        names = [path.stem.removeprefix("weights-") for path in self.folder.glob("weights-*.safetensors")]
        return sorted(int(name) for name in names if name.isdecimal())

    def _path(self, version: int) -> Path:
        return self.folder / f"weights-{version}.safetensors"


def _apart(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As safetensors wants them: on the CPU, contiguous, and no memory in two tensors (tied embeddings)."""
    apart: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in weights.items():
        plain = tensor.detach().cpu().contiguous()
        memory = plain.untyped_storage().data_ptr()
        apart[name] = plain.clone() if memory in seen else plain
        seen.add(memory)
    return apart
