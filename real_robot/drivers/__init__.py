"""Bus drivers."""
