"""What several families use."""
