"""A worker that comes by itself: whom it waits for, what it is told, how many runs it serves; and the key it needs."""

from __future__ import annotations

import os
import re
import threading
from math import inf
from pathlib import Path
from typing import Any

import pytest

from fedasync.rl.engine import Request
from fedasync.trainer.addresses import free_port, own_host
from fedasync.trainer.channels import ChannelError, ChannelSpec
from fedasync.trainer.child import serve_with
from fedasync.trainer.child_settings import ChildSettings
from fedasync.trainer.keys import KEY_VARIABLE, kept_key, key_of_environment, key_of_file
from fedasync.trainer.link import EOF, Link, LinkError, Listener, WrongKeyError, connect
from fedasync.trainer.messages import Message, finished_of, refused, stop, submit, wait, welcome
from fedasync.trainer.remote_worker import CannotWorkError, RemoteWorker
from fedasync.trainer.source import fedasync_version

from .fakes import FakeEngine, engine_of

PATIENCE_S = 60.0
KEY = b"a key of sixteen"


class There:
    """A remote worker in a thread, and a controller's end."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.said: list[str] = []
        self.error: BaseException | None = None
        self.settings = ChildSettings({}, "a test", 0, ChannelSpec("files", str(folder)), pulse_s=0.05)

    def start(self, runs: float = inf, patience_s: float = PATIENCE_S, key: bytes = KEY) -> None:
        worker = RemoteWorker(
            self.address, key, lambda told: engine_of(told.problem), self.said.append, patience_s=patience_s
        )

        def serve() -> None:
            try:
                worker.serve(runs)
            except Exception as error:  # noqa: BLE001 -- looked at by the test
                self.error = error

        self.thread = threading.Thread(target=serve, daemon=True)
        self.thread.start()

    def join(self) -> BaseException | None:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return self.error


def heard(listener: Listener, kind: str) -> tuple[Link, Message]:
    """The next message of a kind."""
    for _ in range(1000):
        for link, received in listener.poll(PATIENCE_S):
            assert received is not EOF, kind
            if received.kind == kind:
                return link, received
    raise AssertionError(f"no {kind}")


@pytest.fixture
def there(tmp_path: Path) -> There:
    return There(tmp_path)


def serve_one(there: There, number: int = 3) -> None:
    """One run, from its listener to its stop."""
    with Listener(there.address, KEY) as listener:
        link, hello = heard(listener, "hello")
        assert (hello.header["kind"], hello.header["number"]) == ("remote", None)
        assert hello.header["version"] == fedasync_version()
        link.send(welcome(number, there.settings.for_others()))
        heard(listener, "ready")
        link.send(submit([Request(5, 7, 0, 0)]))
        (answer,) = finished_of(heard(listener, "finished")[1])
        assert answer.trajectory is not None
        assert answer.trajectory.tokens.tolist()[0] == 7
        link.send(stop())


def test_it_waits_for_a_run_and_serves_one_after_the_other(there: There) -> None:
    there.start(runs=2)
    serve_one(there)
    serve_one(there, 4)
    assert there.join() is None
    assert there.said.count(f"worker 3 of the run at {there.address}") == 1
    assert there.said.count(f"worker 4 of the run at {there.address}") == 1
    assert there.said.count(f"the run at {there.address} has ended") == 2


def test_a_run_that_its_controller_left_is_served_once_more(there: There) -> None:
    there.start(runs=1)
    with Listener(there.address, KEY) as listener:
        heard(listener, "hello")  # and is gone before it says anything
    with Listener(there.address, KEY) as listener:
        link, _ = heard(listener, "hello")
        link.send(welcome(0, there.settings.for_others()))
        heard(listener, "ready")
    serve_one(there)
    assert there.join() is None
    assert f"the run at {there.address} was left by its controller" in there.said


def test_where_there_is_no_place_it_waits_for_one(there: There) -> None:
    there.start(runs=1)
    with Listener(there.address, KEY) as listener:
        link, _ = heard(listener, "hello")
        link.send(wait("all 2 remote workers are there"))
        link.send(welcome(1, there.settings.for_others()))
        heard(listener, "ready")
        link.send(stop())
        there.join()
    assert f"{there.address}: all 2 remote workers are there; waits for a place" in there.said


def test_it_is_told_why_it_is_refused(there: There) -> None:
    there.start()
    with Listener(there.address, KEY) as listener:
        link, _ = heard(listener, "hello")
        link.send(refused("its fedasync is another"))
        error = there.join()
    assert isinstance(error, CannotWorkError)
    assert str(error) == f"{there.address} refuses this worker: its fedasync is another"


def test_an_engine_that_cannot_be_made_is_one_line_on_both_sides(there: There) -> None:
    there.start()
    with Listener(there.address, KEY) as listener:
        link, _ = heard(listener, "hello")
        told: dict[str, Any] = there.settings.for_others()
        link.send(welcome(1, {**told, "problem": {"engine": {"colour": "red"}}}))
        _, failed = heard(listener, "failed")
        error = there.join()
    assert failed.header["fatal"]
    assert "colour" in failed.header["what"]
    assert isinstance(error, CannotWorkError)
    assert str(error).startswith(f"worker 1 of the run at {there.address} cannot be made: ")
    assert "colour" in str(error)


def test_nobody_there_is_said_at_once_and_given_up_in_time(there: There) -> None:
    there.start(patience_s=0.1)
    error = there.join()
    assert isinstance(error, LinkError)
    assert str(error).startswith(f"no run within 0.1 s: nobody listens at {there.address}: ")


def test_another_key_is_not_tried_again(there: There) -> None:
    with Listener(there.address, b"quite another key"):
        there.start()
        assert isinstance(there.join(), WrongKeyError)


def test_settings_travel_and_leave_out_what_is_of_one_machine(there: There) -> None:
    settings = ChildSettings({"task": {}}, "x.toml", 3, ChannelSpec("distributed", "h:1"), tracker_folder="/home/me")
    told = settings.for_others()
    assert "/home/me" not in str(told)
    assert ChildSettings.told(told) == ChildSettings({"task": {}}, "x.toml", 3, ChannelSpec("distributed", "h:1"))


def test_a_key_is_drawn_once_and_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "worker-key"
    key = kept_key(file)
    assert len(key) == 32
    assert file.stat().st_mode & 0o777 == 0o600
    assert kept_key(file) == key == key_of_file(file)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert key_of_environment() is None
    monkeypatch.setenv(KEY_VARIABLE, key.hex())
    assert key_of_environment() == key


def test_a_key_that_is_drawn_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is killed in between, or finds that another was faster, leaves no half of one."""

    def killed(*places: Path) -> None:
        raise KeyboardInterrupt

    file = tmp_path / "worker-key"
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", killed)
        with pytest.raises(KeyboardInterrupt):
            kept_key(file)
    assert not file.exists()
    key = kept_key(file)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda path: False)
        assert kept_key(file) == key
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_is_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "the key"
    kept_key(file)
    file.chmod(mode)
    said = f"the key is open to others \\(mode {mode:o}\\); chmod 600 '{re.escape(str(file))}' would do$"
    with pytest.raises(ValueError, match=said):
        key_of_file(file)


def test_an_engine_is_closed_also_where_its_weights_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closing(FakeEngine):
        ended = False

        def close(self) -> None:
            self.ended = True

    def no_reader(spec: ChannelSpec) -> None:
        raise ChannelError("nobody there")

    monkeypatch.setattr(ChannelSpec, "reader", no_reader)
    engine = Closing()
    with Listener() as listener:
        link = connect(listener.address, listener.authkey)
        with pytest.raises(ChannelError):
            serve_with(engine, ChildSettings({}, "a test", 0, ChannelSpec("files", "nowhere")), link)
        link.close()
    assert engine.ended


@pytest.mark.parametrize("told", ["", "secret", "0011", "0" * 31, "é" * 40])
def test_what_is_no_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    (tmp_path / "key").write_text(told)
    with pytest.raises(ValueError, match=r"key holds no key; at least 16 bytes in hexadecimal would do$"):
        key_of_file(tmp_path / "key")
    monkeypatch.setenv(KEY_VARIABLE, told)
    with pytest.raises(ValueError, match=f"^the environment variable {KEY_VARIABLE} holds no key; at least 16 bytes"):
        key_of_environment()


def test_the_way_to_this_machine_is_this_machine() -> None:
    assert own_host("127.0.0.1:9") == "127.0.0.1"
