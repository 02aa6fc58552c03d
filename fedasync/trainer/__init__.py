"""The real runtime of reinforcement learning: a controller, rollout workers and trainer ranks, as processes."""
