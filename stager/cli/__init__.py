"""What do users type and read? The only package that prints."""
