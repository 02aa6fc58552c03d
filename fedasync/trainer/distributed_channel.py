"""Weights over the network, by torch.distributed: each worker has a gloo group of its own with the trainer.

A group of two for each, so that workers may come, die and come again while the others load. A worker asks for a
version, and gets the last one that was put, in one piece. Both ends use the network over which the worker reaches the
trainer's address, or that of ``GLOO_SOCKET_IFNAME``. Nothing is encrypted, and nobody has to prove who they are.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from fedasync.trainer.addresses import host_and_port, listening, own_host
from fedasync.trainer.channels import GET_S, ChannelError
from fedasync.trainer.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import TCPStore

CONNECT = timedelta(seconds=60)
IDLE = timedelta(days=365)
"""The trainer's end waits for the next question as long as the worker lives; its death closes the group."""
SLACK_S = 60.0
"""For the weights' way, beyond the wait for their version."""
NEWCOMERS_EVERY_S = 0.05
TRAINER, WORKER = 0, 1
IFNAME = "GLOO_SOCKET_IFNAME"

_LOG = logging.getLogger("fedasync.trainer")


class _Put(NamedTuple):
    version: int
    layout: bytes
    block: Tensor


class DistributedWriter:
    """The trainer's end, at ``host:port``; a thread for each worker answers it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._put: _Put | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._store = _store(address, master=True)
        threading.Thread(target=self._let_in, name="weights: newcomers", daemon=True).start()

    def put(self, weights: Mapping[str, Tensor], version: int) -> int:
        import torch

        layout = Layout.of(weights)
        block = torch.empty(layout.block_bytes, dtype=torch.uint8)  # another may still be on its way
        layout.write(weights, block)
        with self._changed:
            self._put = _Put(version, layout.encoded(), block)
            self._changed.notify_all()
        return layout.block_bytes

    def get(self, version: int, timeout_s: float = GET_S) -> tuple[dict[str, Tensor], int]:
        raise ChannelError(f"version {version}: the trainer's end of a distributed channel only puts")

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _let_in(self) -> None:
        number = 1
        while not self._closed:
            if self._store.check([_arrival(number)]):
                threading.Thread(target=self._answer, args=(number,), name=f"weights: {number}", daemon=True).start()
                number += 1
            else:
                time.sleep(NEWCOMERS_EVERY_S)

    def _answer(self, number: int) -> None:
        import torch

        try:
            group = _group(self._address, number, TRAINER)
            asked = torch.zeros(2, dtype=torch.int64)
            while not self._closed:
                group.recv([asked], WORKER, 0).wait(IDLE)
                put = self._wait_for(int(asked[0]), int(asked[1]) / 1000)
                have = self._put.version if self._put else -1
                layout = torch.frombuffer(bytearray(put.layout), dtype=torch.uint8) if put else torch.empty(0)
                sizes = [put.version, layout.numel(), put.block.numel()] if put else [have, 0, -1]
                _send(group, torch.tensor(sizes))
                for part in (layout, put.block) if put else ():
                    _send(group, part)
        except RuntimeError as error:  # the worker has gone; when it comes again it has another number
            _LOG.info("weights: connection %d has ended: %s", number, " ".join(str(error).split()))

    def _wait_for(self, version: int, timeout_s: float) -> _Put | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has(version), timeout_s)
            return self._put if self._has(version) else None

    def _has(self, version: int) -> bool:
        return self._put is not None and self._put.version >= version


class DistributedReader:
    """A worker's end; joins the trainer at its first ``get``, and anew where the trainer was started again."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._group: Any = None

    def put(self, weights: Mapping[str, Tensor], version: int) -> int:
        raise ChannelError(f"version {version}: a worker's end of a distributed channel only gets")

    def get(self, version: int, timeout_s: float = GET_S) -> tuple[dict[str, Tensor], int]:
        known = self._group is not None
        try:
            return self._ask(version, timeout_s)
        except ChannelError:
            raise
        except RuntimeError as error:  # gloo's
            self._group = None
            if not known:
                raise ChannelError(f"version {version} from {self._address}: {' '.join(str(error).split())}") from None
        return self.get(version, timeout_s)

    def close(self) -> None:
        self._group = None

    def _ask(self, version: int, timeout_s: float) -> tuple[dict[str, Tensor], int]:
        import torch

        group = self._group = self._group or self._join()
        limit_s = timeout_s + SLACK_S
        _send(group, torch.tensor([version, int(timeout_s * 1000)]))
        sizes = _received(group, torch.zeros(3, dtype=torch.int64), limit_s)
        found, layout_bytes, block_bytes = sizes.tolist()
        if block_bytes < 0:
            have = f"version {found}" if found >= 0 else "no weights"
            raise ChannelError(f"waited {timeout_s:g} s for version {version}: {self._address} has {have}")
        told = _received(group, torch.empty(layout_bytes, dtype=torch.uint8), limit_s)
        block = _received(group, torch.empty(block_bytes, dtype=torch.uint8), limit_s)
        return Layout.decoded(told.numpy().tobytes()).read(block), found

    def _join(self) -> Any:
        store = _store(self._address)
        number = store.add("arrivals", 1)
        store.set(_arrival(number), "")
        return _group(self._address, number, WORKER)


def _arrival(number: int) -> str:
    return f"arrival/{number}"


def _store(address: str, *, master: bool = False) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = host_and_port(address)
    if not master:
        return TCPStore(host, port, None, False, CONNECT, wait_for_workers=False)
    try:
        listener, _ = listening(address)  # torch's own would listen at every address of the machine
    except OSError as error:
        raise RuntimeError(f"weights: this machine cannot listen at {address}: {error}") from None
    return TCPStore(host, port, None, True, CONNECT, wait_for_workers=False, master_listen_fd=listener.detach())


def _group(address: str, number: int, rank: int) -> Any:
    from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

    store = PrefixStore(f"worker/{number}", _store(address))
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = CONNECT
    if IFNAME in os.environ:
        options._devices = [ProcessGroupGloo.create_default_device()]
    else:
        try:
            host = own_host(address)
        except OSError as error:
            raise RuntimeError(f"no way to {address}: {error}") from None
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    return ProcessGroupGloo(store, rank, 2, options)


def _send(group: Any, tensor: Tensor) -> None:
    peer = WORKER if group.rank() == TRAINER else TRAINER
    group.send([tensor], peer, 0).wait(CONNECT)


def _received(group: Any, tensor: Tensor, timeout_s: float) -> Tensor:
    group.recv([tensor], TRAINER, 0).wait(timedelta(seconds=timeout_s))
    return tensor
