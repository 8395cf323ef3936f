"""Which nodes are meant, and how are ranks started on them?"""
