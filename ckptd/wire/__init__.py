"""Messages between trainer and daemon, over one Unix socket of kind SEQPACKET: a datagram is a message.

Bulk lies in the arena; a message is small. The same codec serves the asyncio daemon and the blocking client.
"""
