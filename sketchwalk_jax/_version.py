"""The version, in one place: the build, the changelog's test and `__version__` read it."""

__version__ = "0.1.0"
