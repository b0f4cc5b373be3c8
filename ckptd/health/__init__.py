"""Whether machines are fit to train: what is looked at before a run, and what is noticed during it. No torch here."""
