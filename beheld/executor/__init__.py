"""Where the runners live."""
