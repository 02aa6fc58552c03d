"""What holds for every test: none is judged by the clock, and none meets a module that another wrote."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _forget_modules_of_the_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module of a test's own folder is imported anew by the next test that writes one of that name."""
    before = set(sys.modules)
    yield
    room = str(tmp_path_factory.getbasetemp())
    for name in sys.modules.keys() - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(room):
            del sys.modules[name]
