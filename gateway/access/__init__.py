"""Who may call: API keys."""
