"""What every federated runtime does, whatever its clock: who starts, what is made of what comes back, what is kept."""
