"""Small studies in which a policy learns, on virtual time and on processes of this machine."""

from __future__ import annotations

PROBLEM = """
[task]
kind = "reverse"
length = 2
symbols = 4
held_out = 8

[policy]
kind = "gpt2"
hidden = 8
layers = 1
heads = 2
context_tokens = 12

[sampling]
max_new_tokens = 4

[optimiser]
learning_rate = 1e-3

[prompts]
answers = 2

[strategy]
name = "areal"
batch = 2
eta = 1
"""

VIRTUAL = (
    """
[study]
title = "small, learning"
seeds = 2

[run]
versions = 4
evaluate_every = 2

[cluster]
generation_gpus = 1
training_gpus = 1
decoding = { kind = "fixed_speed", tokens_per_second = 100.0, max_running = 64 }
trainer = { step_s = 1.0 }
weights = { transfer = false }

[targets]
exact = 0.95

[report]
figures = ["learning_curves"]
"""
    + PROBLEM
)

REAL = (
    """
[study]
title = "small, real"
seeds = 2

[processes]
workers = 1

[run]
versions = 4
evaluate_every = 2

[targets]
exact = 0.95

[[axis]]
name = "strategy"
points = [
  { label = "synchronous", strategy = { name = "synchronous_rl", batch = 2 } },
  { label = "eta 1", strategy = { name = "areal", batch = 2, eta = 1 } },
]

[report]
figures = ["learning_curves"]
"""
    + PROBLEM
)
