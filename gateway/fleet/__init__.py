"""The backends: discovery, scraping, health and the ledger of KV blocks in use."""
