"""Weights arrive to the last bit, whole, and with their version; a reader that is late gets the newest."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fedasync.trainer.addresses import connected, free_port, listening
from fedasync.trainer.channels import ChannelError, ChannelKind, ChannelSpec, FilesChannel, WeightChannel
from fedasync.trainer.layout import Layout

PATIENCE_S = 60.0
torch.set_num_threads(1)


def weights(seed: int) -> dict[str, Tensor]:
    """Of all sorts; ``tied`` is ``float32`` itself."""
    draw = torch.Generator().manual_seed(seed)
    single = torch.randn(5, 7, generator=draw)
    return {
        "float32": single,
        "tied": single,
        "across": torch.randn(6, 4, generator=draw).t(),
        "slice": torch.randn(100, generator=draw)[3:20:2],
        "bfloat16": torch.randn(33, generator=draw).bfloat16(),
        "float16": torch.randn(3, generator=draw).half(),
        "float64": torch.randn((), generator=draw, dtype=torch.float64),
        "int64": torch.tensor([seed, -(1 << 60)]),
        "bool": torch.rand(9, generator=draw) < 0.5,
        "uint8": torch.tensor([255], dtype=torch.uint8),
        "empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(torch.full((2,), float("nan"))),
    }


def assert_same(found: dict[str, Tensor], sent: dict[str, Tensor]) -> None:
    assert found.keys() == sent.keys()
    for name, tensor in sent.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        flat = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (found[name], tensor)]
        assert torch.equal(*flat), name


@pytest.fixture(params=["files", "shared_memory", "distributed"])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> ChannelSpec:
    kind: ChannelKind = request.param
    return ChannelSpec(kind, f"127.0.0.1:{free_port()}" if kind == "distributed" else str(tmp_path / "weights"))


@pytest.fixture
def ends(spec: ChannelSpec) -> Iterator[tuple[WeightChannel, WeightChannel]]:
    writer, reader = spec.writer(), spec.reader()
    yield writer, reader
    reader.close()
    writer.close()


def test_weights_come_back_to_the_last_bit(ends: tuple[WeightChannel, WeightChannel]) -> None:
    writer, reader = ends
    for version in (0, 1, 2):
        size = writer.put(weights(version), version)
        assert size >= sum(each.numel() * each.element_size() for each in weights(version).values())
        found, which = reader.get(version, PATIENCE_S)
        assert which == version
        assert_same(found, weights(version))


def test_what_was_got_is_the_readers_own(ends: tuple[WeightChannel, WeightChannel]) -> None:
    writer, reader = ends
    writer.put(weights(1), 1)
    found, _ = reader.get(1, PATIENCE_S)
    for version in (2, 3, 4):
        writer.put(weights(version), version)
    assert_same(found, weights(1))
    found["float32"].zero_()
    assert_same(reader.get(4, PATIENCE_S)[0], weights(4))


def test_a_late_reader_gets_the_newest_and_is_told_which(ends: tuple[WeightChannel, WeightChannel]) -> None:
    writer, reader = ends
    for version in range(1, 6):
        writer.put(weights(version), version)
    found, which = reader.get(2, PATIENCE_S)
    assert which == 5
    assert_same(found, weights(5))


def test_an_early_reader_waits(ends: tuple[WeightChannel, WeightChannel]) -> None:
    writer, reader = ends
    writer.put(weights(3), 3)
    later = threading.Timer(0.2, writer.put, (weights(4), 4))
    later.start()
    assert reader.get(4, PATIENCE_S)[1] == 4
    later.join()


def test_what_never_comes_is_told_with_what_is_there(ends: tuple[WeightChannel, WeightChannel]) -> None:
    writer, reader = ends
    with pytest.raises(ChannelError, match=r"waited 0\.05 s for version 0: .* no weights"):
        reader.get(0, 0.05)
    writer.put(weights(3), 3)
    with pytest.raises(ChannelError, match=r"waited 0\.05 s for version 4: .* versions? 3"):
        reader.get(4, 0.05)
    assert reader.get(3, PATIENCE_S)[1] == 3  # it goes on


def test_a_trainer_that_goes_back_takes_its_later_versions_with_it(ends: tuple[WeightChannel, WeightChannel]) -> None:
    writer, reader = ends
    for version in (5, 6, 7):
        writer.put(weights(version), version)
    writer.put(weights(66), 6)
    found, which = reader.get(6, PATIENCE_S)
    assert which == 6
    assert_same(found, weights(66))
    with pytest.raises(ChannelError, match="version 7"):
        reader.get(7, 0.05)


def test_a_trainer_that_is_started_again_is_found(spec: ChannelSpec) -> None:
    reader = spec.reader()
    for version in (1, 2):
        writer = spec.writer()
        writer.put(weights(version), version)
        assert_same(reader.get(version, PATIENCE_S)[0], weights(version))
        writer.close()
        del writer
        if spec.kind == "distributed":
            return  # the port is given back with the process
    reader.close()


def test_files_are_few_and_whole(tmp_path: Path) -> None:
    channel = FilesChannel(tmp_path, keep=2)
    (tmp_path / ".weights-9.safetensors").write_bytes(b"half")  # of a trainer that was killed
    for version in range(4):
        channel.put(weights(version), version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["weights-2.safetensors", "weights-3.safetensors"]
    assert_same(load_file(tmp_path / "weights-2.safetensors"), weights(2))
    (tmp_path / "weights-4.safetensors").write_bytes(b"no weights")
    with pytest.raises(ChannelError, match=r"weights-4\.safetensors holds no weights"):
        channel.get(4)


HAMMER = """
import sys, time
import torch
from pathlib import Path
from fedasync.trainer.channels import ChannelSpec
writer = ChannelSpec(sys.argv[1], sys.argv[2]).writer()
version = 0
print("begun", flush=True)
while True:
    version += 1
    writer.put({"a": torch.full((300_001,), version), "b": torch.full((7,), version).bfloat16()}, version)
    time.sleep(float(sys.argv[3]))
"""


@pytest.mark.parametrize("kind", ["files", "shared_memory"])
def test_no_reader_ever_gets_a_torn_version(tmp_path: Path, kind: ChannelKind) -> None:
    """The writer never rests, so that many copies are overtaken and must be thrown away."""
    with hammer(kind, str(tmp_path)):
        reader = ChannelSpec(kind, str(tmp_path)).reader()
        assert_never_torn(reader, least=30)
        reader.close()


def assert_never_torn(reader: WeightChannel, least: int) -> None:
    """Read so many versions of a hammer."""
    last, seen = 0, set[int]()
    until_s = time.monotonic() + PATIENCE_S
    while len(seen) < least and time.monotonic() < until_s:
        found, version = reader.get(last, PATIENCE_S)
        assert bool((found["a"] == version).all())
        assert bool((found["b"] == torch.tensor(version).bfloat16()).all())
        assert version >= last
        seen.add(version)
        last = version
    assert len(seen) >= least


class hammer:  # noqa: N801 -- a context
    """A process that puts versions 1, 2, … until it is killed."""

    def __init__(self, kind: str, place: str, pause_s: float = 0.0) -> None:
        command = [sys.executable, "-c", HAMMER, kind, place, str(pause_s)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> subprocess.Popen[str]:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "begun\n"
        return self.process

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.said = self.process.communicate()[1]


def named_memory() -> set[str]:
    """Without joblib's, which other tests make meanwhile."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("joblib", "sem.loky"))}


def test_a_killed_trainer_leaves_no_memory_behind_and_says_nothing(tmp_path: Path) -> None:
    spec = ChannelSpec("shared_memory", str(tmp_path))
    before = named_memory()
    reader = spec.reader()
    with (held := hammer("shared_memory", str(tmp_path))) as process:
        reader.get(1, PATIENCE_S)
        assert shared_memory_of(os.getpid())
        process.kill()
        process.wait()
    assert held.said == ""
    assert named_memory() <= before
    late = spec.reader()
    with pytest.raises(ChannelError, match="no weights"):
        late.get(1, 0.05)
    with hammer("shared_memory", str(tmp_path)):
        for each in (reader, late):
            assert each.get(1, PATIENCE_S)[1] >= 1
    reader.close()
    late.close()
    assert not shared_memory_of(os.getpid())


def shared_memory_of(pid: int) -> list[str]:
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:fedasync" in line]


def test_shared_memory_has_the_size_of_the_first_put(tmp_path: Path) -> None:
    writer = ChannelSpec("shared_memory", str(tmp_path)).writer()
    writer.put({"a": torch.zeros(3)}, 1)
    with pytest.raises(ValueError, match="holds the tensors of the first put"):
        writer.put({"a": torch.zeros(4)}, 2)
    writer.close()


READER = """
import sys, time
from fedasync.trainer.channels import ChannelSpec
reader = ChannelSpec("distributed", sys.argv[1]).reader()
print(reader.get(1, 60)[1], flush=True)
time.sleep(600)
"""


def test_over_the_network_workers_and_trainer_may_die_and_come_again() -> None:
    address = f"127.0.0.1:{free_port()}"
    reader = ChannelSpec("distributed", address).reader()
    with hammer("distributed", address, 0.02):
        other = subprocess.Popen([sys.executable, "-c", READER, address], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert int(other.stdout.readline()) >= 1
        assert_never_torn(reader, least=3)
        other.kill()
        other.communicate()
        assert_never_torn(reader, least=3)
        assert_never_torn(ChannelSpec("distributed", address).reader(), least=3)
    with hammer("distributed", address, 0.02):
        assert_never_torn(reader, least=3)


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is no address of this machine elsewhere")
def test_over_the_network_the_trainer_listens_at_its_address_and_no_other() -> None:
    address = f"127.0.0.1:{free_port()}"
    writer = ChannelSpec("distributed", address).writer()
    connected(address, PATIENCE_S).close()
    with pytest.raises(ConnectionRefusedError):
        connected(address.replace("127.0.0.1", "127.0.0.2"), PATIENCE_S)
    writer.close()


def test_an_address_that_is_taken_is_told() -> None:
    taken, address = listening("127.0.0.1:0")
    with taken, pytest.raises(RuntimeError, match=f"this machine cannot listen at {address}: .*in use"):
        ChannelSpec("distributed", address).writer()


def test_a_trainer_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    from fedasync.trainer import distributed_channel

    monkeypatch.setattr(distributed_channel, "CONNECT", timedelta(seconds=1))
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ChannelError, match=f"version 1 from {address}: "):
        ChannelSpec("distributed", address).reader().get(1)


@pytest.mark.parametrize(
    ("kind", "place", "said"),
    [("pipe", "x", "channel: kind must be 'files' or"), ("files", 3, "a folder"), ("distributed", "x", "host:port")],
)
def test_what_is_no_channel_is_refused(kind: ChannelKind, place: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ChannelSpec(kind, place)


def test_a_layout_comes_back_and_is_aligned() -> None:
    layout = Layout.of(weights(0))
    assert Layout.decoded(layout.encoded()) == layout
    assert all(place.start % 64 == 0 for place in layout.places)
    assert layout.block_bytes % 64 == 0
