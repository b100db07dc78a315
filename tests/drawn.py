"""Reads a figure for its tests: its panels, and the values behind a heat map."""

import numpy as np


def panels(figure) -> dict[str, object]:
    return {axis.get_title(): axis for axis in figure.axes if axis.get_title()}


def shown(axis) -> np.ndarray:
    """Returns the values behind a heat map, with NaN where nothing is drawn."""
    (image,) = axis.collections or axis.get_images()
    return np.ma.filled(image.get_array().astype(float), np.nan)
