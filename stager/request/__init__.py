"""What may be asked? Directives, the site's policy, and the request that is made of both."""
