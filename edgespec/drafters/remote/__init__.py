"""The client of `edgespec draft serve`: a drafter over a draft on another machine.

messages  the protocol, which the server shares
draft     the server at an address, and what it says of its draft
link      one session of it, which is opened again when it is lost
http      the responses that both read
drafter   the Drafter over a link
"""
