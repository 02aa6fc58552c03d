"""Weights in shared memory: one copy by the trainer, one by each worker, and no torn reads.

The memory has no name (``memfd_create``; Linux): it is found through the trainer's process, which a small file in the
folder names, and is gone with the last process that has it open, however that ended.

A header of 64-bit words, the layout, then two slots of which the trainer writes the older. A slot's sequence number is
odd while it is written, so a reader knows when what it copied was changed meanwhile; a sum of its 64-bit words finds
what a weakly ordered memory would still let through.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedasync.trainer.channels import GET_S, ChannelError
from fedasync.trainer.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]

PLACE_FILE = "shared-memory.json"
PAGE_BYTES = 4096
SLOTS = (0, 1)
SEQUENCE, VERSION, ORDER, SUM = range(4)
"""Words of a slot's header; ORDER counts the puts, from 1."""
SLOT_WORDS = 8


class SharedMemoryWriter:
    """The trainer's end. Names, types and shapes are those of the first put."""

    def __init__(self, folder: Path) -> None:
        if not hasattr(os, "memfd_create"):
            raise ValueError("channel: shared_memory needs Linux; files would do")
        self.folder = folder
        self._memory: _Memory | None = None
        self._file: int | None = None
        self._puts = 0

    def put(self, weights: Mapping[str, Tensor], version: int) -> int:
        import torch

        layout = Layout.of(weights)
        memory = self._memory = self._memory or self._made(layout)
        if layout != memory.layout:
            raise ValueError("channel: shared_memory holds the tensors of the first put; others cannot follow")
        self._puts += 1
        slot, other = memory.slots[self._puts % 2], memory.slots[(self._puts + 1) % 2]
        if other.header[VERSION] >= version:
            other.header[ORDER] = 0
        slot.header[SEQUENCE] += np.uint64(1)
        layout.write(weights, torch.from_numpy(slot.block))
        slot.header[VERSION], slot.header[ORDER] = version, self._puts
        slot.header[SUM] = _sum(slot.block)
        slot.header[SEQUENCE] += np.uint64(1)
        if self._puts == 1:
            self._tell()
        return layout.block_bytes

    def get(self, version: int, timeout_s: float = GET_S) -> tuple[dict[str, Tensor], int]:
        raise ChannelError(f"version {version}: the trainer's end of shared memory only puts")

    def close(self) -> None:
        """Workers that have it open still read it."""
        if self._file is not None:
            (self.folder / PLACE_FILE).unlink(missing_ok=True)
            os.close(self._file)
        self._memory, self._file = None, None

    def _made(self, layout: Layout) -> _Memory:
        told = layout.encoded()
        start = -(-(PAGE_BYTES + len(told)) // PAGE_BYTES) * PAGE_BYTES
        self._name = f"fedasync-{secrets.token_hex(8)}"
        self._file = os.memfd_create(self._name)
        os.ftruncate(self._file, start + 2 * layout.block_bytes)
        mapped = mmap.mmap(self._file, start + 2 * layout.block_bytes)
        mapped[PAGE_BYTES : PAGE_BYTES + len(told)] = told
        mapped[PAGE_BYTES - 8 : PAGE_BYTES] = len(told).to_bytes(8, "little")
        return _Memory.of(mapped)

    def _tell(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        beside = self.folder / f".{PLACE_FILE}"
        beside.write_text(json.dumps({"pid": os.getpid(), "file": self._file, "name": self._name}))
        beside.replace(self.folder / PLACE_FILE)


class SharedMemoryReader:
    """A worker's end; follows a trainer that was started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._memory: _Memory | None = None
        self._name: str | None = None

    def put(self, weights: Mapping[str, Tensor], version: int) -> int:
        raise ChannelError(f"version {version}: a worker's end of shared memory only gets")

    def get(self, version: int, timeout_s: float = GET_S) -> tuple[dict[str, Tensor], int]:
        until_s = time.monotonic() + timeout_s
        while True:
            self._open()
            if self._memory is not None and (found := self._memory.copy(version)) is not None:
                return found
            if time.monotonic() >= until_s:
                have = self._memory.versions() if self._memory else []
                holds = f"versions {', '.join(map(str, have))}" if have else "no weights"
                raise ChannelError(
                    f"waited {timeout_s:g} s for version {version}: shared memory of {self.folder} holds {holds}"
                )
            time.sleep(0.01)

    def close(self) -> None:
        self._memory = None

    def _open(self) -> None:
        """Open what the file names, where that is new and its trainer lives."""
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            told: dict[str, Any] = json.loads((self.folder / PLACE_FILE).read_text())
            if told["name"] == self._name:
                return
            path = Path(f"/proc/{told['pid']}/fd/{told['file']}")
            if told["name"] not in os.readlink(path):
                return  # another process has that number now
            with path.open("rb", buffering=0) as file:
                self._memory = _Memory.of(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
                self._name = told["name"]


class _Slot(NamedTuple):
    header: Words
    block: Bytes


class _Memory(NamedTuple):
    """The memory as arrays; it is unmapped with the last of them."""

    layout: Layout
    slots: tuple[_Slot, _Slot]

    @staticmethod
    def of(mapped: mmap.mmap) -> _Memory:
        length = int.from_bytes(mapped[PAGE_BYTES - 8 : PAGE_BYTES], "little")
        layout = Layout.decoded(mapped[PAGE_BYTES : PAGE_BYTES + length])
        start = -(-(PAGE_BYTES + length) // PAGE_BYTES) * PAGE_BYTES
        words = np.frombuffer(mapped, np.uint64, len(SLOTS) * SLOT_WORDS)

        def slot(number: int) -> _Slot:
            header = words[number * SLOT_WORDS :][:SLOT_WORDS]
            block = np.frombuffer(mapped, np.uint8, layout.block_bytes, start + number * layout.block_bytes)
            return _Slot(header, block)

        return _Memory(layout, (slot(0), slot(1)))

    def versions(self) -> list[int]:
        return sorted(int(slot.header[VERSION]) for slot in self.slots if slot.header[ORDER])

    def copy(self, version: int) -> tuple[dict[str, Tensor], int] | None:
        """A version, or the last put where that is newer; None where neither is there, whole, just now."""
        import torch

        newest_first = sorted(self.slots, key=lambda slot: -int(slot.header[ORDER]))
        for slot in [*(each for each in newest_first if each.header[VERSION] == version), newest_first[0]]:
            before, found, order, told = map(int, slot.header[: SUM + 1])
            if before % 2 or not order or found < version:
                continue
            block = slot.block.copy()
            if int(slot.header[SEQUENCE]) == before and _sum(block) == told:
                return self.layout.read(torch.from_numpy(block)), found
        return None


def _sum(block: Bytes) -> int:
    return int(block.view(np.uint64).sum(dtype=np.uint64))
