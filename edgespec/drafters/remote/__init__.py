"""The client of `edgespec draft serve`: a drafter over a draft on another machine.

messages  the protocol, which the server shares
link      a session of the server, opened again when it is lost, and how its responses are read
drafter   the server at an address, what it says of its draft, and the drafter over a link
"""
