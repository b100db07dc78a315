"""Measures how well a policy selects on any checkpoint: tasks, runs that score them, a report."""

from sketchwalk_jax.calibration import Calibration, calibrate
from sketchwalk_jax.evaluation.runner import evaluate, evaluate_model
from sketchwalk_jax.evaluation.settings import EvaluationConfig
from sketchwalk_jax.text.haystack import read_text

__all__ = [
    "Calibration",
    "EvaluationConfig",
    "calibrate",
    "evaluate",
    "evaluate_model",
    "read_text",
]
