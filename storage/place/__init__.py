"""Storage backends: a local folder or an object store, and fast reads from them."""
