"""Learners, replay, loops, evaluation and the policy artefact."""
