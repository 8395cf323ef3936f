"""What do people type and read? ``stagectl``, one module a command; nothing else prints."""
