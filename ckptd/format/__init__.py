"""What lies in storage: names, records, digests, proofs. Pure: no I/O, no clock, no torch."""
