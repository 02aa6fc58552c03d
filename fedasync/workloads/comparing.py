"""How differently two versions of a classifier answer the same questions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

MOST_COMPARED = 512
"""Inputs on which two versions are compared, as the released code of the low-switching-cost work takes them."""


class Answers(NamedTuple):
    """What a version says of N inputs, in float64."""

    logits: Tensor
    """[N, classes]."""
    features: Tensor | None
    """[N, d]: what the module's last linear layer sees, where that layer makes the logits and another comes before."""


def compared_rows(samples: int) -> NDArray[np.int64]:
    """At most ``MOST_COMPARED`` of the rows 0 … samples − 1, evenly spread."""
    count = min(samples, MOST_COMPARED)
    return np.arange(count, dtype=np.int64) * samples // count


def answers(module: Module, x: Tensor) -> Answers:
    """What the module says of inputs [N, ...], in evaluation mode."""
    import torch

    module.eval()
    last = _last_linear(module)
    seen: list[tuple[Tensor, Any]] = []
    hook = None if last is None else last.register_forward_hook(lambda _, given, made: seen.append((given[0], made)))
    try:
        with torch.no_grad():
            logits = module(x)
    finally:
        if hook is not None:
            hook.remove()
    features = seen[0][0].flatten(1).to("cpu", torch.float64) if len(seen) == 1 and seen[0][1] is logits else None
    return Answers(logits.to("cpu", torch.float64), features)


def _last_linear(module: Module) -> Module | None:
    """The last linear layer, if others learn before it."""
    from torch.nn import Linear

    layers = [layer for layer in module.modules() if isinstance(layer, Linear)]
    own = {id(parameter) for parameter in layers[-1].parameters()} if layers else set()
    return layers[-1] if layers and any(id(parameter) not in own for parameter in module.parameters()) else None


def differences(published: Answers, current: Answers) -> dict[str, float]:
    """``disagreement`` (share of other classes), ``kl`` (current ‖ published, nats, mean) and ``feature_cosine``.

    Equal answers give exactly 0, 0 and 1. The last is there where the module has features.
    """
    log_new, log_old = (each.logits.log_softmax(1) for each in (current, published))
    other = current.logits.argmax(1) != published.logits.argmax(1)
    kl = (log_new.exp() * (log_new - log_old)).sum(1).clamp(min=0)
    found = {"disagreement": float(other.double().mean()), "kl": float(kl.mean())}
    if current.features is not None and published.features is not None:
        found["feature_cosine"] = float(_cosines(current.features, published.features).mean())
    return found


def _cosines(new: Tensor, old: Tensor) -> Tensor:
    """[N]; rows that are both zero are alike (1), a zero row and another are not (0)."""
    import torch

    dot, new_square, old_square = ((a * b).sum(1) for a, b in ((new, old), (new, new), (old, old)))
    norms = (new_square * old_square).sqrt()
    alike = ((new_square == 0) & (old_square == 0)).double()
    return torch.where(norms > 0, dot / norms, alike).clamp(-1, 1)


class Comparison:
    """Compares versions on fixed inputs [N, ...]; the published version's answers are kept while it is the same."""

    def __init__(self, inputs: Tensor) -> None:
        self._inputs = inputs
        self._kept: tuple[object, int, Answers] | None = None

    def compare(self, module: Module, load: Callable[[Any], None], published: Any, current: Any) -> dict[str, float]:
        """See ``differences``; ``load`` brings a model into the module."""
        written = published.values._version
        if self._kept is None or self._kept[0] is not published or self._kept[1] != written:
            load(published)
            self._kept = (published, written, answers(module, self._inputs))
        load(current)
        return differences(self._kept[2], answers(module, self._inputs))
