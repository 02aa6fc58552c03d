"""Laws of a partition: every sample to exactly one client, nobody empty, the same again for the same seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.workloads import Dirichlet, Iid, LabelShards, Partition

seeds = st.integers(0, 2**63 - 1)
partitions = st.one_of(
    st.just(Iid()),
    st.builds(Dirichlet, alpha=st.sampled_from([0.5, 1.0, 100.0])),
    st.builds(LabelShards, shards_per_client=st.integers(1, 3)),
)
label_arrays = st.builds(
    lambda count, seed: np.random.default_rng(seed).integers(0, 5, count), st.integers(60, 120), st.integers(0, 999)
)


@given(partitions, label_arrays, st.integers(1, 8), seeds)
def test_every_sample_goes_to_exactly_one_client(
    partition: Partition, labels: np.ndarray, clients: int, seed: int
) -> None:
    parts = partition.split(labels, clients, seed)
    assert len(parts) == clients
    assert all(len(part) > 0 for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))


@given(partitions, label_arrays, st.integers(1, 8), seeds)
def test_the_same_arguments_give_the_same_split(
    partition: Partition, labels: np.ndarray, clients: int, seed: int
) -> None:
    first, second = partition.split(labels, clients, seed), partition.split(labels, clients, seed)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("partition", [Iid(), Dirichlet(1.0), LabelShards()])
def test_another_seed_gives_another_split(partition: Partition) -> None:
    labels = np.repeat(np.arange(10), 30)
    first, second = partition.split(labels, 5, 1), partition.split(labels, 5, 2)
    assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@given(label_arrays, st.integers(1, 60), seeds)
def test_iid_sizes_differ_by_at_most_one(labels: np.ndarray, clients: int, seed: int) -> None:
    sizes = [len(part) for part in Iid().split(labels, clients, seed)]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), seeds)
def test_shards_that_divide_the_classes_hold_one_label_each(
    clients: int, shards: int, shard_size: int, seed: int
) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(clients * shards), shard_size))
    for part in LabelShards(shards).split(labels, clients, seed):
        assert len(part) == shards * shard_size
        assert len(np.unique(labels[part])) <= shards


@given(seeds)
def test_a_large_alpha_gives_every_client_nearly_the_mix_of_all(seed: int) -> None:
    labels = np.repeat(np.arange(4), [100, 200, 300, 400])
    for part in Dirichlet(1e6).split(labels, 5, seed):
        assert np.allclose(np.bincount(labels[part], minlength=4), [20, 40, 60, 80], atol=2)


def test_a_small_alpha_concentrates_labels() -> None:
    labels = np.repeat(np.arange(10), 100)

    def largest_share(alpha: float) -> float:
        parts = Dirichlet(alpha).split(labels, 10, 0)
        return float(np.mean([np.bincount(labels[part]).max() / len(part) for part in parts]))

    assert largest_share(0.1) > largest_share(1.0) > largest_share(100.0)


def test_dirichlet_shares_of_a_class_have_the_moments_of_the_distribution() -> None:
    clients, alpha, size, draws = 4, 0.7, 1000, 400
    labels = np.zeros(size, dtype=int)
    shares = np.array(
        [[len(part) / size for part in Dirichlet(alpha).split(labels, clients, seed)] for seed in range(draws)]
    )
    # Var = a(A − a)/(A²(A + 1)) with A = clients·alpha, a little changed by drawing again when one is empty.
    total = clients * alpha
    variance = alpha * (total - alpha) / (total**2 * (total + 1))
    assert np.allclose(shares.mean(axis=0), 1 / clients, atol=0.04)
    assert np.allclose(shares.var(axis=0), variance, rtol=0.25)


@given(st.integers(1, 12), seeds)
def test_dirichlet_keeps_its_minimum(minimum: int, seed: int) -> None:
    labels = np.repeat(np.arange(10), 10)
    assert min(len(p) for p in Dirichlet(1.0, minimum).split(labels, 4, seed)) >= minimum


def test_dirichlet_gives_up_with_advice() -> None:
    labels = np.zeros(100, dtype=int)
    with pytest.raises(ValueError, match=r"alpha=0\.001 over 10 clients .* minimum_samples=9.*larger alpha") as info:
        Dirichlet(0.001, 9).split(labels, 10, 0)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (Iid(), "clients must be at most the number of samples, 10.* got 11"),
        (Dirichlet(1.0), "clients must be at most the number of samples, 10.* got 11"),
        (LabelShards(), "clients must be at most the number of samples, 10.* got 11"),
    ],
)
def test_more_clients_than_samples_is_an_error(partition: Partition, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition.split(np.arange(10), 11, 0)


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (Dirichlet(1.0, 3), "4 clients with minimum_samples=3 need 12 samples and there are 10"),
        (LabelShards(3), "4 clients with shards_per_client=3 need 12 shards and there are 10 samples"),
    ],
)
def test_what_cannot_be_dealt_is_refused_at_once(partition: Partition, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition.split(np.arange(10), 4, 0)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_alpha_is_a_positive_number(alpha: float) -> None:
    with pytest.raises(ValueError, match="Dirichlet: alpha must be a finite number > 0, got"):
        Dirichlet(alpha)


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_counts_are_positive_integers(count: int) -> None:
    with pytest.raises(ValueError, match="minimum_samples must be an integer ≥ 1, got"):
        Dirichlet(1.0, count)
    with pytest.raises(ValueError, match="shards_per_client must be an integer ≥ 1, got"):
        LabelShards(count)
    with pytest.raises(ValueError, match="clients must be an integer ≥ 1, got"):
        Iid().split(np.arange(3), count, 0)


def test_labels_are_one_per_sample() -> None:
    with pytest.raises(ValueError, match=r"labels must have shape \[N\], got \[3, 2\]"):
        Iid().split(np.zeros((3, 2)), 2, 0)
