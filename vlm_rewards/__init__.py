"""Reward models from pictures and sentences: protocol, CLIP, fitting."""
