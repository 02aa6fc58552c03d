"""``python -m fake_worker``: a rollout worker with the engine that counts."""

from __future__ import annotations

from fakes import engine_of

from fedasync.trainer.child import worker_process

if __name__ == "__main__":
    worker_process(lambda settings: engine_of(settings.problem))
