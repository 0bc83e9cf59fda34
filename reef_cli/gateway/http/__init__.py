"""HTTP/1.1 as a server speaks it: requests and answers, the connections they travel on, the sockets that listen.

A general framework takes a third of the time of a recorded request. This takes what one process behind `reef serve` needs:
requests parsed by llhttp, one task each, answers written in one piece or as chunks. Knows no route, no dialect and no token.
"""

from reef_cli.gateway.http.listening import Listener
from reef_cli.gateway.http.messages import Handler, Request, Response, StreamResponse

__all__ = ["Handler", "Listener", "Request", "Response", "StreamResponse"]
