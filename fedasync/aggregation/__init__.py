"""Arrays: how a ready buffer becomes the next model. One short file a family; torch is imported by its users."""
