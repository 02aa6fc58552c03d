"""Entry points that a deployment names in its app folder: the server app and the client app."""
