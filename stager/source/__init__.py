"""Where do the bytes come from? What identifies a source, and how it is read."""
