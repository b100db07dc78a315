"""The version, defined once: the build, the changelog's test and `__version__` read it."""

__version__ = "0.1.0"
