"""Page scores: the attention of queries to each page of keys."""
