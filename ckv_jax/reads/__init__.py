"""What comes from the store: packs, pages of probe keys, and the threads that read them."""
