"""Page scores: what queries would attend to in each page of keys."""
