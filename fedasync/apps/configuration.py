"""A study's configuration as Flower's run configuration, and back: what the apps read theirs with."""

from fedasync.flower.configuration import LARGEST, MARK, OURS, OUT, RESUME, Value, flatten, unflatten, without_ours

__all__ = ["LARGEST", "MARK", "OURS", "OUT", "RESUME", "Value", "flatten", "unflatten", "without_ours"]
