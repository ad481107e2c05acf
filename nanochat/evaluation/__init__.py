"""Measures of a model. They read it and change nothing."""
