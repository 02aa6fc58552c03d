"""Which values a constructor accepts, and the one line that says so when it got another."""

from __future__ import annotations

from math import isfinite
from numbers import Integral, Real
from typing import Any, get_args


def check_integer(name: str, value: object, minimum: int) -> None:
    """Raise ValueError unless ``value`` is an integer ≥ ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ValueError(f"{name} must be an integer ≥ {minimum}, got {value!r}")


def check_real(
    name: str, value: object, low: float, high: float = float("inf"), *, above: bool = False, below: bool = False
) -> None:
    """Raise ValueError unless ``value`` is a finite number in [low, high].

    ``above`` leaves ``low`` itself out, ``below`` leaves ``high`` itself out.
    """
    if isinstance(value, Real) and not isinstance(value, bool) and isfinite(value):
        number = float(value)
        if (low < number if above else low <= number) and (number < high if below else number <= high):
            return
    limits = [f"{'>' if above else '≥'} {low:g}"] if isfinite(low) else []
    if isfinite(high):
        limits.append(f"{'<' if below else '≤'} {high:g}")
    accepted = " ".join(["a finite number", " and ".join(limits)]).strip()
    raise ValueError(f"{name} must be {accepted}, got {value!r}")


def check_type(name: str, value: object, kind: Any, wanted: str) -> None:
    """Raise ValueError unless ``value`` is of a type, or of one of a union; ``wanted`` says so in words."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def check_choice(name: str, value: object, choices: object) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``, a ``Literal`` type."""
    accepted = get_args(choices)
    if value not in accepted:
        raise ValueError(f"{name} must be {' or '.join(map(repr, accepted))}, got {value!r}")


def check_client(client: int, clients: int) -> None:
    """Raise ValueError unless ``client`` is one of 0 … ``clients`` − 1 (a negative index would wrap around)."""
    if not 0 <= client < clients:
        raise ValueError(f"client must be between 0 and {clients - 1}, got {client}")
