"""Products of a few token rows with stacked weights."""
