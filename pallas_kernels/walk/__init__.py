"""The walk of the printed rule."""
