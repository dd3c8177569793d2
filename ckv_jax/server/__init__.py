"""OpenAI's API over HTTP, in a thin layer over `Engine`."""
