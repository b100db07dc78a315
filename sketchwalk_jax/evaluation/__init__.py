"""Quality of a selection on any checkpoint: tasks, the runs that score them, and their report.

Names are imported when they are first used: training takes its sentences from here.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sketchwalk_jax.calibration import Calibration as Calibration
    from sketchwalk_jax.calibration import calibrate as calibrate
    from sketchwalk_jax.evaluation.runner import evaluate as evaluate
    from sketchwalk_jax.evaluation.runner import evaluate_model as evaluate_model
    from sketchwalk_jax.evaluation.settings import EvaluationConfig as EvaluationConfig
    from sketchwalk_jax.text import read_text as read_text

_MODULES = {
    "Calibration": "sketchwalk_jax.calibration",
    "EvaluationConfig": "sketchwalk_jax.evaluation.settings",
    "calibrate": "sketchwalk_jax.calibration",
    "evaluate": "sketchwalk_jax.evaluation.runner",
    "evaluate_model": "sketchwalk_jax.evaluation.runner",
    "read_text": "sketchwalk_jax.text",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Imports an exported name from its module on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the exported names."""
    return __all__
