"""What the tests, the demo, the examples and the benchmarks share and no wheel ships: real servers and processes."""
