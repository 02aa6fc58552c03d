"""Reinforcement learning without a clock: tasks, policies, rollouts, losses, and the learner's step."""
