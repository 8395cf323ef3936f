"""Does safety rest on firm ground here? Facts of the site and its nodes, and what they mean."""
