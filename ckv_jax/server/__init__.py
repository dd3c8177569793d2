"""OpenAI's HTTP API, a thin layer over `Engine`."""
