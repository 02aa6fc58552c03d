"""What is started is ended, with all that it began, whatever happens meanwhile; nobody waits in silence."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fedasync.flower.leftovers import PROCESSES, end_leftovers
from fedasync.flower.ports import demand_free, free_port, is_healthy
from fedasync.flower.service import FederationError, Service, end, family, is_running, orphans, uninterrupted, wait_for
from fedasync.flower.services import Services

SLEEP = "import time; time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
ADDRESS = "127.0.0.1:1"


def parent(child: str, *, own_session: bool, then: str = SLEEP) -> str:
    """A program that starts another one, maybe in a session of its own as a SuperLink does with its SuperExec."""
    return (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}, '--parent-pid', "
        f"str(__import__('os').getpid()), '--runtime-api-address', '{ADDRESS}'], start_new_session={own_session}); "
        + "print('begun', flush=True); "
        + then
    )


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts a program, and waits until it says so."""
    started: list[Service] = []

    def begin(code: str, said: str = "", name: str = "program") -> Service:
        service = Service(name, [sys.executable, "-c", code], tmp_path / f"{name}.log", os.environ)
        started.append(service)
        if said:
            wait_for(f"{name} to begin", lambda: said in service.output(), 60, [service])
        return service

    yield begin
    for service in started:
        service.kill()


@pytest.mark.parametrize("own_session", [False, True])
@pytest.mark.parametrize("child", [SLEEP, DEAF])
@pytest.mark.parametrize("how", ["end", "kill"])
def test_whatever_a_process_began_ends_with_it(
    begin: Callable[..., Service], own_session: bool, child: str, how: str
) -> None:
    service = begin(parent(child, own_session=own_session), "begun")
    members = family([service.process])
    assert len(members) == 2
    if how == "end":
        end([service.process], 5.0 if child == SLEEP else 0.3)
        service.reap()
    else:
        service.kill()
    assert not any(map(is_running, members))
    assert service.status == (-signal.SIGTERM if how == "end" else -signal.SIGKILL)


def test_what_a_dead_process_left_behind_is_found_by_its_number_and_address(begin: Callable[..., Service]) -> None:
    service = begin(parent(SLEEP, own_session=True), "begun")
    (child,) = family([service.process]) - {service.process}
    service.process.kill()
    service.reap()
    assert orphans([service.pid], ["127.0.0.1:2"]) == set()
    assert orphans([1], [ADDRESS]) == set()
    assert orphans([service.pid], [ADDRESS]) == {child}
    end({child}, 5)
    assert not is_running(child)


def test_an_interrupt_while_ending_ends_all_the_same(begin: Callable[..., Service]) -> None:
    service = begin(
        f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); {SLEEP}", "deaf"
    )
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        end([service.process], 600)
    assert not is_running(service.process)


def test_an_interrupt_waits_until_what_must_not_be_cut_is_done() -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_process_that_ends_early_is_told_with_the_end_of_its_log(begin: Callable[..., Service]) -> None:
    service = begin("import sys; print('\\x1b[92mno data here\\x1b[0m'); sys.exit(3)")
    with pytest.raises(FederationError, match=r"program ended with status 3 while waiting for it.*: no data here$"):
        wait_for("it", lambda: False, 60, [service])


def test_no_wait_is_without_an_end(begin: Callable[..., Service]) -> None:
    service = begin("print('busy', flush=True); " + SLEEP, "busy")
    with pytest.raises(FederationError, match=r"waited 0\.2 s for a reply, in vain; last lines of .*: busy$"):
        wait_for("a reply", lambda: False, 0.2, [service])


def test_a_log_is_kept_and_only_the_last_start_is_read(begin: Callable[..., Service]) -> None:
    begin(f"print('first', flush=True); {SLEEP}", "first")
    second = begin(f"print('second', flush=True); {SLEEP}", "second")
    assert second.output() == "second\n"
    assert second.log.read_text() == "first\nsecond\n"


def crashed_owner(folder: Path) -> dict[str, int]:
    """A process with two services (one of which began another process) that dies without ending them: their pids."""
    code = (
        "import os, sys; from pathlib import Path; from fedasync.flower.services import Services; "
        f"s = Services(Path({str(folder)!r}), os.environ); python = [sys.executable, '-c']; "
        f"s.begin('one', [*python, {parent(DEAF, own_session=True)!r}], {ADDRESS!r}); "
        f"s.begin('two', [*python, {SLEEP!r}]); "
        "import time\nwhile 'begun' not in s['one'].output(): time.sleep(0.05)\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    return {known["name"]: known["pid"] for known in json.loads((folder / PROCESSES).read_text())["processes"]}


@pytest.mark.parametrize("leader_died_too", [False, True])
def test_what_outlives_its_owner_is_ended_by_the_next_in_the_folder(tmp_path: Path, leader_died_too: bool) -> None:
    pids = crashed_owner(tmp_path)
    processes = family(map(psutil.Process, pids.values()))
    assert len(processes) == 3
    if leader_died_too:
        os.kill(pids["one"], signal.SIGKILL)
    lines = end_leftovers(tmp_path, 0.3)
    assert not any(map(is_running, processes))
    assert f"two (process {pids['two']}) was left behind by process" in "\n".join(lines)
    assert not (tmp_path / PROCESSES).exists()
    assert end_leftovers(tmp_path, 0.3) == []


def test_a_number_that_another_process_has_now_is_left_alone(tmp_path: Path, begin: Callable[..., Service]) -> None:
    stranger = begin("print('here', flush=True); " + SLEEP, "here", name="stranger")
    crashed_owner(tmp_path)
    path = tmp_path / PROCESSES
    content = json.loads(path.read_text())
    real = [psutil.Process(known["pid"]) for known in content["processes"]]
    for known in content["processes"]:
        known["pid"] = stranger.pid
    path.write_text(json.dumps(content))
    try:
        end_leftovers(tmp_path, 0.3)
        assert is_running(stranger.process)
    finally:
        end(real, 0.3)


def test_a_process_that_began_at_another_time_is_left_alone(tmp_path: Path) -> None:
    """With the number and the command that were written down."""
    crashed_owner(tmp_path)
    path = tmp_path / PROCESSES
    content = json.loads(path.read_text())
    real = [psutil.Process(known["pid"]) for known in content["processes"]]
    for known in content["processes"]:
        known["began_s"] -= 60.0
    content |= {"pids": [], "addresses": []}
    path.write_text(json.dumps(content))
    try:
        assert end_leftovers(tmp_path, 0.3) == []
        assert all(map(is_running, real))
    finally:
        end(real, 0.3)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    services = Services(tmp_path, os.environ)
    services.begin("one", [sys.executable, "-c", SLEEP])
    try:
        with pytest.raises(FederationError, match=f"is in use by process {os.getpid()}"):
            end_leftovers(tmp_path, 0.3)
        assert services.runs("one")
        with pytest.raises(FederationError, match="one runs already"):
            services.begin("one", [sys.executable, "-c", SLEEP])
    finally:
        services.end(["one"], 5)
        services.forget(5)
    assert not (tmp_path / PROCESSES).exists()


def test_a_process_that_died_by_itself_is_told_from_one_that_was_ended(tmp_path: Path) -> None:
    services = Services(tmp_path, os.environ)
    services.begin("ended", [sys.executable, "-c", SLEEP])
    services.begin("died", [sys.executable, "-c", "import sys; sys.exit('my disk is full')"])
    while services.runs("died"):
        time.sleep(0.01)
    services.end(["ended"], 5)
    (line,) = services.deaths()
    assert line.startswith("died ended by itself with status 1")
    assert line.endswith("my disk is full")


def test_a_taken_port_is_told_and_a_free_one_is_free() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        taken = listening.getsockname()[1]
        with pytest.raises(FederationError, match=f"port {taken} of 127.0.0.1: Address already in use"):
            demand_free(taken)
    demand_free(taken)
    assert not is_healthy(free_port())
