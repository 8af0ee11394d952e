"""The placing laboratory: an hour of traffic in virtual time, on simulated engines, under one policy after another."""
