"""A critic for language: a linear layer over a causal model's last hidden states, in the same module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

NAME = "value_head"


def add_value_head(module: nn.Module) -> None:
    """Give a causal model of Hugging Face a critic that says 0 at first.

    Its outputs then have ``values`` [N, T], after each token, wherever hidden states are asked for. They are made in
    the module's own call, so that what wraps it (DDP, FSDP, autocast) does with the critic as with the rest.
    """
    from torch import nn

    some, config = next(module.parameters()), getattr(module, "config")  # noqa: B009
    head = nn.utils.skip_init(  # type: ignore[no-untyped-call]
        nn.Linear, config.hidden_size, 1, device=some.device, dtype=some.dtype
    )
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    module.add_module(NAME, head)
    module.register_forward_hook(_said, with_kwargs=True)


def has_value_head(module: nn.Module) -> bool:
    return hasattr(module, NAME)


def is_of_value_head(name: str) -> bool:
    """Whether a weight of this name is the critic's, which servers of language models do not know."""
    return name.startswith(f"{NAME}.")


def _said(module: Any, positional: tuple[Any, ...], asked: dict[str, Any], output: Any) -> Any:
    if asked.get("output_hidden_states"):
        output["values"] = module.value_head(output.hidden_states[-1])[..., 0]
    return output
