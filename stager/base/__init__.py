"""What do all packages share? Errors, options, text, paths and the outcome of a stage."""
