"""The planner: what fits on a card, which flags say so, and why a start failed. Knows nothing of the serving path."""
