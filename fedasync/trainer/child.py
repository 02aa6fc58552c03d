"""A child process from its arguments to its end: settings, the link to the controller, and what it is there for."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedasync.trainer.child_settings import ChildSettings
from fedasync.trainer.keys import KEY_VARIABLE, key_of_environment
from fedasync.trainer.lifeline import end_with_parent
from fedasync.trainer.link import Link, connect
from fedasync.trainer.messages import ChildKind, failed, hello

if TYPE_CHECKING:
    from fedasync.rl.engine import Engine
    from fedasync.trainer.rank import Evaluate, Learner


def worker_process(make: Callable[[ChildSettings], Engine], arguments: Sequence[str] | None = None) -> None:
    """A rollout worker: make its engine and serve the controller. What goes wrong is told to it, and raised."""
    told = _parsed("rollout_worker", "A rollout worker of an asynchronous trainer.", arguments, numbered=True)
    end_with_parent()
    with _linked(told.controller, told.number, "worker") as link:
        settings = ChildSettings.read(told.settings)
        serve_with(make(settings), settings, link)


def serve_with(engine: Engine, settings: ChildSettings, link: Link) -> bool:
    """A rollout worker with its weight channel, until ``stop`` or the controller's end; whether it was told to stop."""
    from fedasync.trainer.worker import serve

    try:
        channel = settings.channel.reader()
        try:
            return serve(
                engine,
                link,
                channel,
                pulse_s=settings.pulse_s,
                iterations_s=settings.iterations_s,
                load_timeout_s=settings.load_timeout_s,
            )
        finally:
            channel.close()
    finally:
        if (close := getattr(engine, "close", None)) is not None:  # of one that talks to a server
            close()


def rank_process(
    make: Callable[[ChildSettings], tuple[Learner, Evaluate]], arguments: Sequence[str] | None = None
) -> None:
    """A trainer rank, by the environment variables of torchrun; rank 0 serves the controller, the others follow it."""
    from fedasync.trainer.fellows import Fellows
    from fedasync.trainer.rank import follow, serve

    told = _parsed("trainer_rank", "A rank of an asynchronous trainer.", arguments, numbered=False)
    end_with_parent()
    with _process_group() as several:
        if int(os.environ.get("RANK", "0")):
            settings = ChildSettings.read(told.settings)
            follow(*make(settings), Fellows())
            return
        with _linked(told.controller, 0, "trainer") as link:
            settings = ChildSettings.read(told.settings)
            learner, evaluate = make(settings)
            channel = settings.channel.writer()
            try:
                serve(learner, link, channel, evaluate, Fellows() if several else None)
            finally:
                channel.close()


def _parsed(name: str, does: str, arguments: Sequence[str] | None, *, numbered: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m fedasync.apps.{name}",
        description=f"{does} The environment variable {KEY_VARIABLE} holds the controller's key, in hexadecimal.",
    )
    parser.add_argument("--settings", type=Path, required=True, help="the JSON file that the controller wrote")
    parser.add_argument("--controller", required=True, help="its address: unix:@name, unix:/path or host:port")
    if numbered:
        parser.add_argument("--number", type=int, required=True, help="which worker this is, from 0")
    return parser.parse_args(arguments)


@contextmanager
def _linked(address: str, number: int, kind: ChildKind) -> Iterator[Link]:
    """A link that has said hello, tells of an error, and is closed in the end."""
    key = key_of_environment()
    if key is None:
        raise ValueError(f"the environment variable {KEY_VARIABLE} must be the controller's key, in hexadecimal")
    link = connect(address, key)
    try:
        link.send(hello(number, kind))
        yield link
    except Exception as error:
        link.send(failed(error))
        raise
    finally:
        link.close()


@contextmanager
def _process_group() -> Iterator[bool]:
    """torch.distributed among several ranks (NCCL for what is on GPUs, gloo for the rest); whether there are."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield False
        return
    import torch
    from torch import distributed

    distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield True
    finally:
        distributed.destroy_process_group()
