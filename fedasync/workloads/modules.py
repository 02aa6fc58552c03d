"""Small modules for the data sets at hand, each from a batch of features to logits.

A function here returns a picklable, comparable ``partial`` that makes the module, so that workloads made alike train
in one batch.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from fedasync.core.bounds import check_choice, check_integer

if TYPE_CHECKING:
    from torch.nn import Module

VectorModel = Literal["linear", "mlp"]
ImageModel = Literal["mlp", "cnn"]
SequenceModel = Literal["gru", "lstm", "transformer"]
HEADS = 4


def vector_module(name: str, model: VectorModel, inputs: int, hidden: int, classes: int) -> partial[Module]:
    """For vectors of ``inputs`` numbers.

    Raises ValueError for a ``model`` or ``hidden`` that there is not; ``name`` is the workload's.
    """
    check_choice(f"{name}: model", model, VectorModel)
    check_integer(f"{name}: hidden", hidden, 1)
    return partial(mlp, inputs, hidden, classes) if model == "mlp" else partial(_linear, inputs, classes)


def image_module(
    name: str, model: ImageModel, shape: tuple[int, int, int], hidden: int, classes: int
) -> partial[Module]:
    """For flat images of ``shape`` (channels, height, width).

    Raises ValueError for a ``model`` or ``hidden`` that there is not; ``name`` is the workload's.
    """
    check_choice(f"{name}: model", model, ImageModel)
    check_integer(f"{name}: hidden", hidden, 1)
    if model == "mlp":
        return partial(mlp, shape[0] * shape[1] * shape[2], hidden, classes)
    if min(shape[1:]) < 4:
        raise ValueError(f"{name}: model 'cnn' halves images twice: they need 4 pixels each way, got {shape[1:]}")
    return partial(cnn, shape, classes)


def sequence_module(
    name: str, model: SequenceModel, length: int, embedding: int, hidden: int, layers: int, tokens: int, classes: int
) -> partial[Module]:
    """From token ids [B, ``length``] to logits [B, ``classes``].

    Raises ValueError for sizes that there are not; ``name`` is the workload's.
    """
    check_choice(f"{name}: model", model, SequenceModel)
    for key, value in {"embedding": embedding, "hidden": hidden, "layers": layers}.items():
        check_integer(f"{name}: {key}", value, 1)
    if model == "transformer":
        if hidden % HEADS:
            raise ValueError(f"{name}: hidden must be a multiple of the transformer's {HEADS} heads, got {hidden}")
        return partial(_transformer, length, hidden, layers, tokens, classes)
    return partial(_recurrent, model, embedding, hidden, layers, tokens, classes)


def _linear(inputs: int, classes: int) -> Module:
    from torch import nn

    return nn.Linear(inputs, classes)


def mlp(inputs: int, hidden: int, classes: int) -> Module:
    """One hidden layer with ReLU, from [B, inputs] to logits [B, classes]."""
    from torch import nn

    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def cnn(shape: tuple[int, int, int], classes: int) -> Module:
    """Two 3 × 3 convolutions of 16 and 32 channels, each with ReLU and 2 × 2 max-pooling, and a linear layer.

    20,490 parameters for images of 1 × 28 × 28 in 10 classes.
    """
    from torch import nn

    channels, height, width = shape
    return nn.Sequential(
        nn.Unflatten(1, shape),
        nn.Conv2d(channels, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), classes),
    )


def _recurrent(model: SequenceModel, embedding: int, hidden: int, layers: int, tokens: int, classes: int) -> Module:
    from torch import Tensor, nn

    class Recurrent(nn.Module):
        """The output after the last token, through a linear layer."""

        def __init__(self) -> None:
            super().__init__()
            kind = nn.GRU if model == "gru" else nn.LSTM
            self.embedding = nn.Embedding(tokens, embedding)
            self.recurrent = kind(embedding, hidden, layers, batch_first=True)
            self.head = nn.Linear(hidden, classes)

        def forward(self, ids: Tensor) -> Tensor:
            outputs, _ = self.recurrent(self.embedding(ids))
            logits: Tensor = self.head(outputs[:, -1])
            return logits

    return Recurrent()


def _transformer(length: int, hidden: int, layers: int, tokens: int, classes: int) -> Module:
    import torch
    from torch import Tensor, nn

    class Transformer(nn.Module):
        """Every token sees the whole sequence, which lies before what is predicted; read at the last one."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(tokens, hidden)
            self.position = nn.Parameter(torch.randn(length, hidden) * 0.02)
            # Without dropout: modules that draw random numbers cannot train in lanes.
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(hidden, HEADS, 4 * hidden, 0.0, "gelu", batch_first=True, norm_first=True)
                for _ in range(layers)
            )
            self.norm = nn.LayerNorm(hidden)
            self.head = nn.Linear(hidden, classes)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids) + self.position
            for block in self.blocks:
                x = block(x)
            logits: Tensor = self.head(self.norm(x[:, -1]))
            return logits

    return Transformer()
