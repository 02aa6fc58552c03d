"""How new weights reach the rollout servers, and how long a server takes for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedasync.core.bounds import check_choice, check_integer, check_real, check_type
from fedasync.simulation.cluster.hardware import Gpu, LanguageModel
from fedasync.simulation.laws import Law

Order = Literal["all_at_once", "one_by_one", "each"]
KvCache = Literal["recompute", "keep"]


@dataclass(frozen=True)
class Weights:
    """Weight synchronisation: a server learns of a version after ``poll_s``, stops, receives, loads, and goes on.

    While it does it generates nothing for ``pause_s``, then its weights at ``bytes_per_second`` (None: the network of
    one GPU), then ``load_s``. ``sharded``: each GPU of a server receives its own part over its own link.
    ``transfer = false``: nothing travels, as where trainer and server share memory.

    ``order``: all servers stop, load and go on together (``all_at_once``); in turn while the others generate
    (``one_by_one``); or ``each`` by itself, whatever the others do. Before any of it the trainer writes the weights for
    ``publish_s``, when it does nothing else and nothing is asked for.

    ``poll_s`` is drawn once an update where all servers load together, and for each server where they do not.
    ``kv`` says what becomes of the KV cache of sequences that go on: computed anew under the new weights (as AReaL
    does), or kept.
    """

    pause_s: float = 0.0
    bytes_per_second: float | None = None
    load_s: float = 0.0
    publish_s: float = 0.0
    poll_s: Law | float = 0.0
    order: Order = "all_at_once"
    kv: KvCache = "recompute"
    transfer: bool = True
    sharded: bool = False

    def __post_init__(self) -> None:
        for name in ("transfer", "sharded"):
            check_type(f"weights: {name}", getattr(self, name), bool, "true or false")
        check_type("weights: poll_s", self.poll_s, Law | int | float, "a number ≥ 0, or a law such as Constant(1.0)")
        check_real("weights: pause_s", self.pause_s, 0)
        check_real("weights: load_s", self.load_s, 0)
        check_real("weights: publish_s", self.publish_s, 0)
        if isinstance(self.poll_s, int | float):
            check_real("weights: poll_s", self.poll_s, 0)
        if self.bytes_per_second is not None:
            check_real("weights: bytes_per_second", self.bytes_per_second, 0, above=True)
            if not self.transfer:
                raise ValueError("weights: bytes_per_second says nothing where transfer = false; leave one of them out")
        check_choice("weights: order", self.order, Order)
        check_choice("weights: kv", self.kv, KvCache)

    def seconds(self, gpu: Gpu, model: LanguageModel, tensor_parallel: int) -> float:
        """Of one update of one server, apart from ``poll_s``."""
        check_integer("tensor_parallel", tensor_parallel, 1)
        return self.pause_s + self.transfer_s(gpu, model, tensor_parallel) + self.load_s

    def transfer_s(self, gpu: Gpu, model: LanguageModel, tensor_parallel: int) -> float:
        """Seconds that the weights of one server travel."""
        if not self.transfer:
            return 0.0
        rate = gpu.network_bytes_per_second if self.bytes_per_second is None else self.bytes_per_second
        return model.weight_bytes / (rate * tensor_parallel if self.sharded else rate)
