"""The HTTP application: what OpenAI's clients speak, in one thin layer over `Engine`."""
