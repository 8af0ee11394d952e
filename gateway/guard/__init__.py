"""Fitting: window arithmetic, clamp and refusal. Pure: data in, data out."""
