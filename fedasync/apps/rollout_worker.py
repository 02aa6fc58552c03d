"""A rollout worker's process: ``python -m fedasync.apps.rollout_worker``."""

from __future__ import annotations

from fedasync.studies.worker_engine import engine
from fedasync.trainer.child import worker_process

if __name__ == "__main__":
    worker_process(engine)
