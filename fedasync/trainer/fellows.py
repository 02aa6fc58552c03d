"""The trainer's ranks: rank 0 says what is done, and the others do the same, since gradients are everybody's."""

from __future__ import annotations

from datetime import timedelta

from fedasync.trainer.messages import Message, decoded, encoded

IDLE = timedelta(days=365)
"""A rank waits for the next message as long as rank 0 lives; its death closes the connection."""


class Fellows:
    """Messages from rank 0 to all ranks, by ``torch.distributed`` over gloo, whatever carries the gradients.

    torch.distributed must be initialised; every rank makes one, at the same time.
    """

    def __init__(self) -> None:
        from torch import distributed

        self._group = distributed.new_group(backend="gloo", timeout=IDLE)

    def tell(self, message: Message) -> None:
        """From rank 0: every other rank's ``hear`` gives this."""
        self._broadcast(encoded(message))

    def hear(self) -> Message:
        """On the other ranks: what rank 0 tells next."""
        return decoded(self._broadcast(None))

    def _broadcast(self, content: bytes | None) -> bytes:
        import torch
        from torch import distributed

        size = torch.tensor([len(content or b"")])
        distributed.broadcast(size, 0, group=self._group)
        if content is not None:
            block = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        else:
            block = torch.empty(int(size), dtype=torch.uint8)
        distributed.broadcast(block, 0, group=self._group)
        return block.numpy().tobytes()
