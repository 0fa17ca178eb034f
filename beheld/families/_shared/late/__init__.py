"""Late interaction: queries and page images become a vector for each token."""
