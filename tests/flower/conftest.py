"""Messages outside a Flower process, and Flower's own serialisation. The private names are pinned by flwr's version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture(scope="session", autouse=True)
def task_identity() -> Iterator[None]:
    """``Message(...)`` works only where a run, a node and a task are known."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_run_id", "_node_id", "_task_id"):
            patch.setattr(TaskIdentity, name, 1)
        yield


@pytest.fixture(scope="session")
def over_the_wire() -> Callable[[RecordDict], RecordDict]:
    """Records as the other side gets them: taken apart into bytes, as Flower sends them, and put together again."""

    def sent(content: RecordDict) -> RecordDict:
        parts = {name: part.deflate() for name, part in get_all_nested_objects(content).items()}
        received = inflate_object_from_contents(content.object_id, parts)
        assert isinstance(received, RecordDict)
        return received

    return sent


@pytest.fixture(scope="session")
def node() -> Callable[..., Context]:
    """The context of a node: ``node({"partition-id": 3}, {"seed": 0})``."""

    def made(node_config: dict[str, Any], run_config: dict[str, Any] | None = None) -> Context:
        return Context(run_id=1, node_id=1, node_config=node_config, state=RecordDict(), run_config=run_config or {})

    return made
