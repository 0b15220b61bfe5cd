"""What every HTTP server of this package shares. Needs the extra `server` (uvicorn).

listening   an address, taken before anything else is opened
exposure    who can reach a server; its certificate
draining    a server that lets what runs end when a signal comes
access      the access log
keys        API keys
protocol    what is a request's head, and what is not
connection  work that ends when the client goes away
"""

__all__: list[str] = []
