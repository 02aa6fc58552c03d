"""The runtime over Flower: real clients, a real clock, the same coordinator."""
