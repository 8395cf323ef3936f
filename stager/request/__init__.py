"""What may be asked? Directives, the site's policy and the request made of both."""
