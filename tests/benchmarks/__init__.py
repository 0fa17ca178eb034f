"""Of the benchmarks: that they measure what they say."""
