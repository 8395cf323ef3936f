"""What do all packages share? Errors, options, formats, paths, and the outcome of a stage."""
