"""What a run leaves behind, the same for every runtime: its log, its measures, its verdict on itself."""
