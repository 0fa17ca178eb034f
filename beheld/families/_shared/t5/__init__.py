"""What models with T5's decoder share."""
