"""Counting: tokenizers, chat templates, backend-side counting and calibration."""
