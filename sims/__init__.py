"""Engines, worlds, tasks, rendering and adapters to other people's environments."""
