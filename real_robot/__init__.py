"""Drivers, sensors, emulators, safety and deployment. Never imports torch."""
